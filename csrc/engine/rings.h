// Lets control messages between rank 0 and the other ranks of its machine go through shared memory.
#pragma once

#include "control/socket_channel.h"
#include "transport/transport.h"

namespace bagua {

// Called by every rank before the channel and the transport are used for anything else.
void share_rings(SocketChannel& channel, Transport& transport, double timeout_s);

}  // namespace bagua
