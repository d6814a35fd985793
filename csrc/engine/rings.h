// Lets control messages between ranks of one machine go through shared memory: those of rank 0's
// machine straight, posts on another by its first rank where the settings want that.
#pragma once

#include "common/config.h"
#include "control/socket_channel.h"
#include "transport/transport.h"

namespace bagua {

// Called by every rank before the channel and the transport are used for anything else.
void share_rings(SocketChannel& channel, Transport& transport, const Config& config);

}  // namespace bagua
