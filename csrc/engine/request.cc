#include "engine/request.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <tuple>
#include <type_traits>

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

Difference layout_difference(const Description& here, const Description& there) {
  if (here.kind == OpKind::kAddProcessSet)
    return {"ranks", shape_text(here.layout), shape_text(there.layout)};
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

// All fields, in the order of the bytes and of what users hear first. A new one does not compile
// until it is here.
template <class D>
auto fields_of(D& d) {
  auto& [kind, on_device, captured, registered, op, root, prescale, postscale, priority, codec,
         peers, background, exact_in_nodes, earlier, failures, layout] = d;
  return std::tie(kind, on_device, captured, registered, op, root, prescale, postscale, priority,
                  codec, peers, background, exact_in_nodes, earlier, failures, layout);
}
using Fields = decltype(fields_of(std::declval<Description&>()));

// Whether f says so of each field and its counterpart, up to the first of which it does not.
template <class F>
bool all_fields(const Description& here, const Description& there, F&& f) {
  const auto hold = [&](const auto&... mine) {
    return std::apply([&](const auto&... theirs) { return (f(mine, theirs) && ...); },
                      fields_of(there));
  };
  return std::apply(hold, fields_of(here));
}

// What users call them.
struct Words {
  const char* what;
  const char *no = "0", *yes = "1";
};
constexpr Words kWords[] = {{"operation"},
                            {"place", "the host", "a GPU"},
                            {"capture", "none", "in a CUDA graph"},
                            {"registration with NCCL (nccl_register)", "none", "of an arena"},
                            {"reduce op"},
                            {"root"},
                            {"prescale_factor"},
                            {"postscale_factor"},
                            {"priority"},
                            {"codec", "raw"},
                            {"peers", "all"},
                            {"background"},
                            {"hierarchical"},
                            {"the number of earlier exchanges in this step"},
                            {"the number of backward passes that had failed"}};
static_assert(std::size(kWords) + 1 == std::tuple_size_v<Fields>,
              "the layout has words of its own");

std::string text_of(OpKind kind, const Words&) { return kind_name(kind); }
std::string text_of(ReduceOp op, const Words&) { return op_name(op); }
std::string text_of(int32_t number, const Words&) { return std::to_string(number); }
std::string text_of(double number, const Words&) { return number_text(number); }
std::string text_of(bool is, const Words& words) { return is ? words.yes : words.no; }
std::string text_of(const std::string& text, const Words& words) {
  return text.empty() ? words.no : text;
}

template <class T>
void put(Writer& w, const T& field) {
  w.put(field);
}
void put(Writer& w, const std::string& field) { w.put_string(field); }
void put(Writer& w, const std::vector<int64_t>& field) { w.put_vector(field); }

template <class T>
void get(Reader& r, T& field) {
  field = r.get<T>();
}
void get(Reader& r, std::string& field) { field = r.get_string(); }
void get(Reader& r, std::vector<int64_t>& field) { field = r.get_vector<int64_t>(); }

}  // namespace

void Description::add_tensor(DType dtype, const int64_t* shape, size_t ndim) {
  if (layout.empty()) layout.reserve(2 + ndim);
  layout.push_back(static_cast<int64_t>(dtype));
  layout.push_back(static_cast<int64_t>(ndim));
  layout.insert(layout.end(), shape, shape + ndim);
}

bool Description::operator==(const Description& other) const {
  return all_fields(*this, other, [](const auto& a, const auto& b) { return a == b; });
}

std::string Description::encode() const {
  Writer w;
  std::apply([&](const auto&... field) { (put(w, field), ...); }, fields_of(*this));
  return w.take();
}

Description Description::decode(std::string_view bytes) {
  Reader r(bytes);
  Description d;
  std::apply([&](auto&... field) { (get(r, field), ...); }, fields_of(d));
  return d;
}

Difference first_difference(const Description& here, const Description& there) {
  Difference found;
  const Words* words = kWords;
  all_fields(here, there, [&](const auto& mine, const auto& theirs) {
    if constexpr (std::is_same_v<decltype(mine), const std::vector<int64_t>&>) {
      found = layout_difference(here, there);
      return false;
    } else {
      if (mine != theirs) found = {words->what, text_of(mine, *words), text_of(theirs, *words)};
      ++words;
      return mine == theirs;
    }
  });
  if (here.kind == OpKind::kRemoveProcessSet && found.what == "root") found.what = "process set";
  return found;
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
