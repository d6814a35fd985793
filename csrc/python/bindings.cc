// The module. This folder alone knows Python: tensors come in as (pointer, element type, shape),
// results of unknown size go out as buffers that the engine owns.
#include <pybind11/stl.h>
#include <unistd.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collective/collective.h"
#include "common/config.h"
#include "common/deadline.h"
#include "common/log.h"
#include "control/socket.h"
#include "control/socket_channel.h"
#include "device/device.h"
#include "device/nccl_library.h"
#include "engine/bucket.h"
#include "engine/engine.h"
#include "engine/rings.h"
#include "python/coding.h"
#include "python/gradients.h"
#include "python/handle.h"
#include "python/notice.h"
#include "python/objects.h"
#include "python/plain.h"
#include "python/submit.h"
#include "python/thin.h"
#include "python/written.h"
#include "transport/mpi.h"
#include "transport/nccl.h"
#include "transport/node.h"

using namespace bagua;

namespace {

Config config_from(const py::dict& d) {
  Config c;
  c.allreduce = d["allreduce"].cast<std::string>();
  c.fusion_nbytes = static_cast<int64_t>(d["fusion_mb"].cast<double>() * (1 << 20));
  c.stall_warn_s = d["stall_warn_s"].cast<double>();
  c.stall_fail_s = d["stall_fail_s"].cast<double>();
  c.peer_timeout_s = d["peer_timeout_s"].cast<double>();
  c.start_timeout_s = d["start_timeout_s"].cast<double>();
  c.spin_us = d["spin_us"].cast<double>();
  c.shared_memory = d["transport"].cast<std::string>() != "mpi";
  c.needs_shared_memory = d["transport"].cast<std::string>() == "shm";
  c.helpers = d["helpers"].cast<int>();
  c.nccl = d["nccl"].cast<bool>();
  c.nccl_path = d["nccl_path"].cast<std::string>();
  c.allow_shared_gpu = d["allow_shared_gpu"].cast<bool>();
  c.nccl_shares_gpu = d["nccl_shares_gpu"].cast<bool>();
  c.inline_drive = d["inline_drive"].cast<bool>();
  c.carriers = d["carriers"].cast<std::string>();
  c.network_interfaces = d["network_interfaces"].cast<std::string>();
  c.log_level = d["log_level"].cast<std::string>();
  return c;
}

// How tensors on GPUs will go, as far as that can be told before one came: a script chooses its GPU
// after the start, and may load NCCL.
std::string way_of_gpus(const Config& config) {
  const std::string by_host = "tensors on GPUs go by the host's memory";
  if (cuda_compiled() == "not built") return "no GPUs: built without CUDA";
  if (!has_cuda_driver()) return "no cuda device: no driver of NVIDIA's";
  if (!config.nccl) return by_host + ": nccl=False";
  const std::string nccl = nccl_in_sight(config.nccl_path);
  if (nccl.empty()) return by_host + " unless an NCCL is found when the first comes";
  return "tensors on GPUs go by NCCL (" + nccl +
         "), and where ranks cannot use it by the host's memory";
}

std::shared_ptr<Engine> start_engine(uintptr_t communicator, SocketListener* listener,
                                     const std::string& address, int rank, const py::dict& settings,
                                     const std::vector<std::string>& names) {
  const Config config = config_from(settings);
  choose_device_anew();
  py::gil_scoped_release release;
  auto channel = listener ? accept_channel(*listener, config.start_timeout_s)
                          : connect_channel(address, rank, config.start_timeout_s);
  std::string why_not;
  auto transport = connect_mpi(reinterpret_cast<void*>(communicator), config.shared_memory,
                               config.start_timeout_s, why_not);
  if (!why_not.empty() && config.needs_shared_memory)
    throw UsageError("transport='shm' cannot be used: " + why_not);
  share_rings(*channel, *transport, config);
  const Log log(rank, config.log_level);
  if (!why_not.empty())
    log.write(LogLevel::kWarning, "no shared memory between ranks of one machine: " + why_not);
  const int near = transport->node() ? transport->node()->size() : 1;
  log.write(LogLevel::kInfo, "rank " + std::to_string(rank) + " of " +
                                 std::to_string(transport->size()) + ", " + std::to_string(near) +
                                 " of them share memory here, messages by " + mpi_compiled());
  if (log.enabled(LogLevel::kInfo)) log.write(LogLevel::kInfo, way_of_gpus(config));
  // A child of fork() has none of its threads, for which its end would wait: there it stays.
  const auto end = [maker = ::getpid()](Engine* engine) {
    if (::getpid() == maker) delete engine;
  };
  return {new Engine(config, std::move(transport), std::move(channel), names), end};
}

// The caller found something wrong before there was anything to submit: tells the other ranks that
// make the same call, and throws the UsageError.
void refuse(const std::shared_ptr<Engine>& engine, int kind, const std::string& name, int set,
            const std::string& refusal) {
  auto request = std::make_shared<Request>();
  request->description.kind = static_cast<OpKind>(kind);
  request->name = name;
  request->set = set;
  request->refusal = refusal;
  engine->submit(std::move(request), Urgency::kNow);
}

// This rank takes no part any more in anything of the set whose name begins so; others hear why.
void withdraw(const std::shared_ptr<Engine>& engine, const std::string& beginning, int set,
              const std::string& why) {
  auto request = std::make_shared<Request>();
  request->name = beginning;
  request->set = set;
  request->refusal = why;
  request->for_good = true;
  engine->submit(std::move(request), Urgency::kNow);
}

py::dict build_info() {
  py::dict info;
  info["version"] = BAGUA_VERSION;
  info["mpi"] = mpi_compiled();
  info["compiler"] = __VERSION__;
  info["transports"] = std::vector<std::string>{"shm", "mpi"};
  std::vector<std::string> names;
  for (const Collective& row : collectives()) names.push_back(row.name);
  info["collectives"] = names;
  std::vector<std::string> formats;
  for (const Codec& row : codecs()) formats.push_back(row.name);
  info["codecs"] = formats;
  info["cuda"] = cuda_compiled();
  info["nccl"] = cuda_compiled() == "not built" ? "not built" : "found when it is needed";
  return info;
}

// Memory that NCCL can register; null where there is no NCCL, or one that cannot.
std::shared_ptr<Memory> memory_of_nccl(int number, const std::string& path, int64_t nbytes) {
  Device& device = device_of(number);
  std::string why_not;
  const NcclLibrary* library = device.nccl(path, why_not);
  auto data = library ? nccl_memory(*library, device, static_cast<size_t>(nbytes)) : nullptr;
  return data ? std::make_shared<Memory>(Memory{std::move(data), nbytes, true}) : nullptr;
}

// The same for all processes that use the device, whatever number it has there.
py::bytes device_identity(int number) { return any_device(number).identity(); }

// The version of NCCL that would be used, or "no NCCL: <why>".
std::string nccl_found(const std::string& path) {
  std::string why_not;
  const NcclLibrary* library = find_nccl(path, why_not);
  return library ? version_text(*library) : "no NCCL: " + why_not;
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    set_error(error);
  }
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  py::register_exception_translator(translate);
  release_no_more_at_exit();
  add_submit(m);
  add_handle_type(m);
  add_notice_type(m);
  add_gradient_functions(m);
  add_coding_type(m);
  add_thin(m);
  m.def("refuse", refuse);
  m.def("withdraw", withdraw);
  // In a forked child the engine's thread does not exist: nobody may ever wait for it.
  m.def("abandon", [](Engine& engine) { engine.abandon(); });
  m.def("build_info", build_info);
  // (name, lossy, needs feedback) of each
  m.def("codecs", [] {
    std::vector<std::tuple<std::string, bool, bool>> rows;
    for (const Codec& row : codecs()) rows.emplace_back(row.name, row.lossy, row.needs_feedback);
    return rows;
  });
  m.def("cuda_devices", cuda_devices);
  m.def("has_cuda_driver", has_cuda_driver);
  m.def("device_identity", device_identity);
  m.def("nccl_found", nccl_found);
  m.def("nccl_memory", memory_of_nccl);
  m.def("tell_written", tell_written);
  m.def("note_written", [](const py::object& tensors) { note_written(tensors.ptr()); });
  m.def("pretend", pretend);
  py::class_<PretendedStream>(m, "PretendedStream")
      .def(py::init<>())
      .def("use", &PretendedStream::use)
      .def("copy", &PretendedStream::copy)
      .def("drain", &PretendedStream::drain, py::call_guard<py::gil_scoped_release>());
  m.def("mpi_compiled", mpi_compiled);
  m.def("local_addresses", local_addresses);

  py::class_<Deadline>(m, "Deadline")  // its time begins where it is entered
      .def(py::init<double, std::string>())
      .def("__enter__", &Deadline::begin)
      .def("__exit__", [](Deadline& deadline, const py::args&) { deadline.call_off(); });

  py::class_<SocketListener>(m, "Listener")
      .def(py::init<int, const std::string&>())
      .def_property_readonly("address", &SocketListener::address);

  py::class_<Memory, std::shared_ptr<Memory>>(m, "Memory", py::buffer_protocol())
      .def_buffer([](Memory& memory) {
        if (memory.on_device && !pretends()) throw py::buffer_error("it is on a GPU");
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data.get()), memory.nbytes);
      })
      .def_readonly("on_device", &Memory::on_device)
      // https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
      .def_property_readonly("__cuda_array_interface__", [](const Memory& memory) {
        if (!memory.on_device) throw py::attribute_error("it is not on a GPU");
        py::dict about;
        about["version"] = 3;
        about["shape"] = py::make_tuple(memory.nbytes);
        about["typestr"] = "|u1";
        about["data"] = py::make_tuple(reinterpret_cast<uintptr_t>(memory.data.get()), false);
        return about;
      });

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init(&start_engine), py::arg("communicator"), py::arg("listener").none(true),
           py::arg("address"), py::arg("rank"), py::arg("settings"), py::arg("names"))
      .def_property_readonly("rank", &Engine::rank)
      .def_property_readonly("size", &Engine::size)
      .def("nodes_of", &Engine::nodes_of)
      .def("allocate",
           [](Engine& e, int64_t nbytes) {
             if (nbytes < 0) throw UsageError("there is no memory of a negative size");
             return std::make_shared<Memory>(
                 Memory{e.allocate(static_cast<size_t>(nbytes)), nbytes});
           })
      .def("stop", &Engine::stop)
      .def("wait_stopped", &Engine::wait_stopped, py::call_guard<py::gil_scoped_release>())
      .def("failure",
           [](Engine& e) {
             return e.failure() ? py::object(py::str(e.failure()->what)) : py::none();
           })
      .def("tell", &Engine::tell)
      .def("counters", [](const Engine& e) {
        const auto counters = e.counters();
        py::dict d;
        d["sent_nbytes"] = counters.sent_nbytes;
        d["touched_nbytes"] = counters.touched_nbytes;
        d["codec_us"] = counters.codec_us;
        d["exchanges"] = counters.exchanges;
        d["helped"] = counters.helped;
        d["control_messages"] = e.message_count();
        return d;
      });

  py::class_<Bucket, std::shared_ptr<Bucket>>(m, "Bucket", py::buffer_protocol())
      .def_buffer([](Bucket& b) {
        if (b.device()) throw py::buffer_error("this arena is not in the host's memory");
        return py::buffer_info(reinterpret_cast<uint8_t*>(b.data()), b.nbytes());
      })
      .def(py::init([](std::shared_ptr<Engine> engine, const std::string& name, int dtype,
                       const std::vector<int64_t>& counts, int op, double prescale,
                       double postscale, int set, int priority, const std::string& codec,
                       bool exact_in_nodes, int kept, const std::string& peers, bool background,
                       int device, const py::object& allocate) {
             Description d;
             if (!codec.empty()) parse_coding(codec);
             parse_peers(peers);
             d.codec = codec;
             d.peers = peers;
             d.background = background;
             d.exact_in_nodes = exact_in_nodes;
             d.op = static_cast<ReduceOp>(op);
             d.prescale = prescale;
             d.postscale = postscale;
             // allocate(nbytes) -> (address, owner), of memory on the device
             const auto on_device = [&](size_t nbytes) {
               const auto memory = allocate(nbytes).cast<std::pair<uintptr_t, py::object>>();
               return std::shared_ptr<char>(keep(memory.second.ptr()),
                                            reinterpret_cast<char*>(memory.first));
             };
             return std::make_shared<Bucket>(
                 std::move(engine), name, static_cast<DType>(dtype), counts, d, set, priority, kept,
                 device == kHost ? nullptr : &device_of(device), on_device);
           }),
           py::arg("engine"), py::arg("name"), py::arg("dtype"), py::arg("counts"), py::arg("op"),
           py::arg("prescale"), py::arg("postscale"), py::arg("set"), py::arg("priority"),
           py::arg("codec") = "", py::arg("exact_in_nodes") = false, py::arg("kept") = 0,
           py::arg("peers") = "", py::arg("background") = false, py::arg("device") = kHost,
           py::arg("allocate") = py::none())
      .def_property_readonly("begins", &Bucket::begins)
      .def_property_readonly("kept",
                             [](const Bucket& b) {
                               py::list all;
                               if (b.device()) return all;  // whoever allocated it has it
                               for (const auto& data : b.kept())
                                 all.append(std::make_shared<Memory>(Memory{
                                     {data, reinterpret_cast<char*>(data.get())}, 4 * b.count()}));
                               return all;
                             })
      .def("ready", &Bucket::ready)
      .def("use_registered", &Bucket::use_registered)
      .def("touch", &Bucket::touch)
      .def("refuse", &Bucket::refuse)
      .def("last_launch",
           [](const Bucket& b) -> py::object {
             HandlePtr handle = b.last_launch();
             if (!handle) return py::none();
             return py::reinterpret_steal<py::object>(
                 make_handle(b.engine(), std::move(handle), Py_None));
           })
      .def_property_readonly("launch_count", &Bucket::launch_count)
      .def("count_steps", &Bucket::count_steps)
      .def_property_readonly("earlier", &Bucket::earlier)
      .def_property_readonly("failures", &Bucket::failures)
      .def("count_anew", &Bucket::count_anew)
      .def("count_quietly", &Bucket::count_quietly)
      .def_static("in_an_arena",
                  [](uintptr_t address) {
                    return Bucket::in_an_arena(reinterpret_cast<const char*>(address));
                  })
      .def_property_readonly("large", &Bucket::large);
}
