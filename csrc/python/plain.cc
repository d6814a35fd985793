#include "python/plain.h"

#include <pybind11/pybind11.h>

#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>

#include "common/errors.h"
#include "device/pretend.h"

namespace bagua {

namespace py = pybind11;

namespace {

// DLPack's wire format, https://dmlc.github.io/dlpack/latest/c_api.html (version 1.3).
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLExchange {
  uint32_t major, minor;
  DLExchange* older;
  void* allocator;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};
constexpr uint32_t kMajor = 1;
constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;

PretendDevice* pretended = nullptr;
Device::Stream pretended_stream = nullptr;

struct ElementType {
  uint8_t code, bits;
  DType dtype;
};
constexpr ElementType kElementTypes[] = {
    {2, 32, DType::kF32}, {4, 16, DType::kBF16}, {2, 16, DType::kF16}, {2, 64, DType::kF64},
    {0, 64, DType::kI64}, {0, 32, DType::kI32},  {0, 16, DType::kI16}, {0, 8, DType::kI8},
    {1, 8, DType::kU8},   {6, 8, DType::kBool},
};

const DLExchange* table_of(PyTypeObject* type) {
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  const DLExchange* table = nullptr;
  if (capsule)
    table = static_cast<DLExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_XDECREF(capsule);
  PyErr_Clear();
  while (table && table->major != kMajor) table = table->older;
  return table && table->tensor_from_object ? table : nullptr;
}

// The table of a type, or null. Looked up once per type; types are kept alive by it. Hundreds of
// tensors in a row are of one.
const DLExchange* exchange_of(PyTypeObject* type) {
  using Known = std::unordered_map<PyTypeObject*, const DLExchange*>;
  static auto* known = new Known;
  static Known::const_iterator last = known->end();
  if (last != known->end() && last->first == type) return last->second;
  last = known->find(type);
  if (last == known->end()) {
    Py_INCREF(type);
    last = known->emplace(type, table_of(type)).first;
  }
  return last->second;
}

// A lazily negated tensor's memory does not hold its values; DLPack's table does not tell.
bool is_negated(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  PyObject* answer = PyObject_CallMethodNoArgs(tensor, name);
  const bool negated = answer != Py_False;
  if (!answer) {
    const bool has_none = PyErr_ExceptionMatches(PyExc_AttributeError);
    PyErr_Clear();
    return !has_none;
  }
  Py_DECREF(answer);
  return negated;
}

bool read_exchanged(const DLExchange& table, PyObject* object, Plain& plain) {
  DLTensor t;
  if (table.tensor_from_object(object, &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (t.device_type != kCpu && t.device_type != kCuda) return false;
  if (t.lanes != 1 || t.ndim > Plain::kMaxDims) return false;
  const ElementType* type = nullptr;
  for (const ElementType& row : kElementTypes)
    if (row.code == t.code && row.bits == t.bits) type = &row;
  if (!type) return false;  // complex tensors, too, which may be lazily conjugated
  int64_t expected = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    plain.shape[i] = t.shape[i];
    if (t.strides && t.shape[i] != 1 && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  if (!t.data && expected > 0) return false;
  plain.data = static_cast<char*>(t.data) + t.byte_offset;
  plain.device = t.device_type == kCuda ? t.device_id : pretended ? pretended->number() : kHost;
  plain.dtype = type->dtype;
  plain.ndim = t.ndim;
  return true;
}

bool dtype_of_format(std::string_view format, Py_ssize_t itemsize, DType& dtype) {
  const auto signed_integer = [&] {
    return itemsize == 8   ? DType::kI64
           : itemsize == 4 ? DType::kI32
           : itemsize == 2 ? DType::kI16
                           : DType::kI8;
  };
  if (format == "Zf") return dtype = DType::kC64, true;
  if (format == "Zd") return dtype = DType::kC128, true;
  if (format.size() != 1) return false;
  switch (format[0]) {
    case '?':
      return dtype = DType::kBool, true;
    case 'B':
      return dtype = DType::kU8, true;
    case 'e':
      return dtype = DType::kF16, true;
    case 'f':
      return dtype = DType::kF32, true;
    case 'd':
      return dtype = DType::kF64, true;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
      return dtype = signed_integer(), true;
    default:
      return false;
  }
}

// Its memory stays where it is while the object lives. Other buffers move unless their view is
// held.
bool is_ndarray(PyObject* object) {
  static PyObject* const type =
      py::module_::import("numpy").attr("ndarray").cast<py::object>().release().ptr();
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type));
}

bool read_buffer(PyObject* object, Plain& plain) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool ok = view.ndim <= Plain::kMaxDims && view.format &&
                  dtype_of_format(view.format, view.itemsize, plain.dtype);
  if (ok) {
    plain.data = static_cast<char*>(view.buf);
    plain.device = kHost;
    plain.ndim = view.ndim;
    for (int i = 0; i < view.ndim; ++i) plain.shape[i] = view.shape[i];
  }
  PyBuffer_Release(&view);
  return ok;
}

int chosen_device = kHost;  // this process's, once a tensor has been on one

PyObject* torch_tensor() {
  static PyObject* const type =
      py::module_::import("torch").attr("Tensor").cast<py::object>().release().ptr();
  return type;
}

}  // namespace

void choose_device_anew() { chosen_device = kHost; }

Device& any_device(int number) { return pretended ? *pretended : find_device(number); }

Device& device_of(int number) {
  if (pretended) return *pretended;
  if (chosen_device == kHost) chosen_device = number;
  if (number != chosen_device)
    throw UsageError(
        "a process has one GPU: this one began with cuda:" + std::to_string(chosen_device) +
        ", and here is a tensor on cuda:" + std::to_string(number) +
        "; call torch.cuda.set_device(local_rank()) first, and start a rank for each");
  return find_device(number);
}

Device::Stream current_stream(const Device& device) {
  if (pretended) return pretended_stream;
  const DLExchange* table = exchange_of(reinterpret_cast<PyTypeObject*>(torch_tensor()));
  void* stream = nullptr;
  if (table && table->current_stream && table->current_stream(kCuda, device.number(), &stream) == 0)
    return stream;
  PyErr_Clear();
  const auto raw = py::module_::import("torch._C").attr("_cuda_getCurrentRawStream");
  return reinterpret_cast<Device::Stream>(raw(device.number()).cast<uintptr_t>());
}

void pretend(int work_us) { pretended = new PretendDevice(work_us); }
bool pretends() { return pretended != nullptr; }
PretendedStream::PretendedStream() : stream_(pretended->add_stream()) {}
void PretendedStream::use() const { pretended_stream = stream_; }
void PretendedStream::copy(uintptr_t to, uintptr_t from, size_t nbytes) const {
  pretended->copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes,
                  stream_);
}
void PretendedStream::drain() const { pretended->drain(stream_); }

bool is_exchangeable(PyObject* tensor) { return exchange_of(Py_TYPE(tensor)) != nullptr; }

bool read_memory(PyObject* tensor, Plain& plain) {
  if (const DLExchange* table = exchange_of(Py_TYPE(tensor)))
    return read_exchanged(*table, tensor, plain);
  return is_ndarray(tensor) && read_buffer(tensor, plain);
}

bool read_plain(PyObject* tensor, Plain& plain) {
  return read_memory(tensor, plain) && !(is_exchangeable(tensor) && is_negated(tensor));
}

}  // namespace bagua
