#include "engine/request.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace bagua {

// Nobody has waited for it, and memory of the device must not go while it is written to.
Handle::~Handle() {
  if (keepalive_) device_->keep_until(end_, std::move(keepalive_));
  for (Output& output : outputs)
    if (output.on_device && output.data) device_->keep_until(end_, std::move(output.data));
}

namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    text +=
        (i ? ", " : "") + (shape[i] == kAnyExtent ? std::string("any") : std::to_string(shape[i]));
  return text + "]";
}

// As short as it can be told from any other.
std::string number_text(double x) {
  char text[32];
  for (int digits = 1; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, x);
    if (std::strtod(text, nullptr) == x) break;
  }
  return text;
}

Difference tensor_difference(const Description& here, const Description& there) {
  const auto a = tensors_of(here), b = tensors_of(there);
  if (a.size() != b.size())
    return {"number of tensors", std::to_string(a.size()), std::to_string(b.size())};
  for (size_t i = 0; i < a.size(); ++i) {
    const std::string which = a.size() > 1 ? " of tensor " + std::to_string(i) : "";
    if (a[i].dtype != b[i].dtype)
      return {"dtype" + which, dtype_name(a[i].dtype), dtype_name(b[i].dtype)};
    if (a[i].shape != b[i].shape)
      return {"shape" + which, shape_text(a[i].shape), shape_text(b[i].shape)};
  }
  return {"layout", "?", "?"};
}

}  // namespace

void Description::add_tensor(DType dtype, const int64_t* shape, size_t ndim) {
  if (layout.empty()) layout.reserve(2 + ndim);
  layout.push_back(static_cast<int64_t>(dtype));
  layout.push_back(static_cast<int64_t>(ndim));
  layout.insert(layout.end(), shape, shape + ndim);
}

bool Description::operator==(const Description& other) const {
  return kind == other.kind && op == other.op && root == other.root && prescale == other.prescale &&
         postscale == other.postscale && on_device == other.on_device &&
         captured == other.captured && registered == other.registered &&
         priority == other.priority && codec == other.codec && peers == other.peers &&
         background == other.background && exact_in_nodes == other.exact_in_nodes &&
         layout == other.layout;
}

std::string Description::encode() const {
  Writer w;
  w.put(kind);
  w.put(op);
  w.put(root);
  w.put(prescale);
  w.put(postscale);
  w.put(priority);
  w.put_string(codec);
  w.put_string(peers);
  w.put(background);
  w.put(exact_in_nodes);
  w.put(on_device);
  w.put(captured);
  w.put(registered);
  w.put_vector(layout);
  return w.take();
}

Description Description::decode(std::string_view bytes) {
  Reader r(bytes);
  Description d;
  d.kind = r.get<OpKind>();
  d.op = r.get<ReduceOp>();
  d.root = r.get<int32_t>();
  d.prescale = r.get<double>();
  d.postscale = r.get<double>();
  d.priority = r.get<int32_t>();
  d.codec = r.get_string();
  d.peers = r.get_string();
  d.background = r.get<bool>();
  d.exact_in_nodes = r.get<bool>();
  d.on_device = r.get<bool>();
  d.captured = r.get<bool>();
  d.registered = r.get<bool>();
  d.layout = r.get_vector<int64_t>();
  return d;
}

Difference first_difference(const Description& here, const Description& there) {
  if (here.kind != there.kind) return {"operation", kind_name(here.kind), kind_name(there.kind)};
  if (here.kind == OpKind::kAddProcessSet)
    return {"ranks", shape_text(here.layout), shape_text(there.layout)};
  if (here.on_device != there.on_device)
    return {"place", here.on_device ? "a GPU" : "the host", there.on_device ? "a GPU" : "the host"};
  if (here.captured != there.captured)
    return {"capture", here.captured ? "in a CUDA graph" : "none",
            there.captured ? "in a CUDA graph" : "none"};
  if (here.registered != there.registered)
    return {"registration with NCCL (nccl_register=False does without)",
            std::to_string(here.registered), std::to_string(there.registered)};
  if (here.op != there.op) return {"reduce op", op_name(here.op), op_name(there.op)};
  if (here.root != there.root) {
    const char* what = here.kind == OpKind::kRemoveProcessSet ? "process set" : "root";
    return {what, std::to_string(here.root), std::to_string(there.root)};
  }
  if (here.prescale != there.prescale)
    return {"prescale_factor", number_text(here.prescale), number_text(there.prescale)};
  if (here.postscale != there.postscale)
    return {"postscale_factor", number_text(here.postscale), number_text(there.postscale)};
  if (here.priority != there.priority)
    return {"priority", std::to_string(here.priority), std::to_string(there.priority)};
  if (here.codec != there.codec) return {"codec", here.codec, there.codec};
  if (here.peers != there.peers) return {"peers", here.peers, there.peers};
  if (here.background != there.background)
    return {"background", std::to_string(here.background), std::to_string(there.background)};
  if (here.exact_in_nodes != there.exact_in_nodes)
    return {"hierarchical", std::to_string(here.exact_in_nodes),
            std::to_string(there.exact_in_nodes)};
  return tensor_difference(here, there);
}

int64_t TensorInfo::count() const { return count_of(shape.data(), shape.size()); }

int64_t TensorInfo::row_count() const {
  return shape.empty() ? 1 : count_of(shape.data() + 1, shape.size() - 1);
}

std::vector<TensorInfo> tensors_of(const Description& description) {
  std::vector<TensorInfo> tensors;
  for_each_tensor(description, [&](DType dtype, const int64_t* dimensions, size_t ndim) {
    tensors.push_back({dtype, {dimensions, dimensions + ndim}});
  });
  return tensors;
}

int64_t nbytes_of(const Description& description) {
  int64_t nbytes = 0;
  for_each_tensor(description, [&](DType dtype, const int64_t* dimensions, size_t ndim) {
    nbytes += std::max<int64_t>(count_of(dimensions, ndim), 0) *
              static_cast<int64_t>(dtype_nbytes(dtype));
  });
  return nbytes;
}

}  // namespace bagua
