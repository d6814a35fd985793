#include "engine/nccl_coded.h"

#include <algorithm>

#include "codec/gpu.h"
#include "collective/coded.h"

namespace bagua {
namespace {

// Wires begin at multiples of this, for kernels load several codes at once.
constexpr int64_t kPlace = 4;
// Formats of single values are cut in pieces of so many, whose wires begin at such places, too.
constexpr int64_t kSingles = 64;

// Which values each rank adds up, and what their wire takes.
struct Parts {
  const std::vector<Slice> values;
  std::vector<int64_t> nbytes, at;
  int64_t total_nbytes = 0;
  Parts(const Coding& coding, int64_t count, int size) : values(slices_for(&coding, count, size)) {
    for (const Slice& slice : values) {
      const int64_t wire = slice.count > 0 ? coding.wire_nbytes(slice.count) : 0;
      nbytes.push_back((wire + kPlace - 1) / kPlace * kPlace);
      at.push_back(total_nbytes);
      total_nbytes += nbytes.back();
    }
  }
};

// NCCL's own average is that of the ranks it has.
void allreduce_plain(const OnDevice& on, const Job& job, float* data, int64_t count) {
  const Finish& finish = job.finish;
  if (job.op != ReduceOp::kAverage || finish.divisor == on.size)
    return on.nccl.allreduce({{data, data, count}}, DType::kF32, {job.op, finish.factor});
  on.nccl.allreduce({{data, data, count}}, DType::kF32, {ReduceOp::kSum, 1});
  gpu_scale(DType::kF32, data, count, finish.factor / finish.divisor, on.device, on.stream);
}

// Everyone gets everyone's wire, see collective/sparse.cc.
void allreduce_sparse(const OnDevice& on, const Job& job, float* data, int64_t count) {
  const Coding& coding = *job.coding;
  const int64_t wire = coding.wire_nbytes(count), stride = (wire + kPlace - 1) / kPlace * kPlace;
  const bool densely = goes_densely(on.size, wire, count);
  char* wires = on.borrow(static_cast<size_t>(densely ? stride : stride * on.size));
  char* mine = densely ? wires : wires + on.me * stride;
  gpu_encode(coding, data, job.kept[0], count, mine, on.device, on.stream);
  if (densely) {
    gpu_decode(coding, mine, count, data, on.device, on.stream);
    return allreduce_plain(on, job, data, count);
  }
  on.nccl.allgather(mine, wires, NcclGroup::Counts(static_cast<size_t>(on.size), stride),
                    DType::kU8);
  gpu_sum(coding, {wires, stride, on.size}, job.finish, count, data, on.device, on.stream);
}

// Who adds up a part gets everyone's wire of it, and encodes the sum, see collective/compressed.cc.
void allreduce_parts(const OnDevice& on, const Job& job, float* data, int64_t count) {
  const Coding& coding = *job.coding;
  const auto me = static_cast<size_t>(on.me);
  const Parts parts(coding, count, on.size);
  const int64_t mine = parts.nbytes[me];
  char* said = on.borrow(static_cast<size_t>(parts.total_nbytes));
  char* heard = on.borrow(static_cast<size_t>(mine * on.size));
  gpu_encode(coding, data, job.kept[0], count, said, on.device, on.stream);
  on.nccl.alltoall(said, heard, parts.nbytes, std::vector<int64_t>(parts.nbytes.size(), mine),
                   DType::kU8);

  char* result = on.borrow(static_cast<size_t>(parts.total_nbytes));
  const Slice part = parts.values[me];
  float* lost = job.kept[1] ? job.kept[1] + part.begin : nullptr;
  gpu_add_up(coding, {heard, mine, on.size}, job.finish, lost, part.count, result + parts.at[me],
             data + part.begin, on.device, on.stream);
  on.nccl.allgather(result + parts.at[me], result, parts.nbytes, DType::kU8);
  gpu_decode(coding, result, count, data, on.device, on.stream);
}

}  // namespace

bool can_code_on_device(const std::string& codec, DType dtype) {
  const Coding coding = parse_coding(codec);
  return float_like(dtype) && gpu_codes(coding);
}

std::vector<Slice> slices_for(const Coding* coding, int64_t count, int ranks) {
  const int64_t piece = std::max(coding ? coding->block() : 1, kSingles);
  const int64_t pieces = (count + piece - 1) / piece;
  std::vector<Slice> slices;
  for (int i = 0; i < ranks; ++i) {
    const Slice slice = slice_of(pieces, ranks, i);
    const int64_t begin = std::min(slice.begin * piece, count);
    const int64_t end = std::min((slice.begin + slice.count) * piece, count);
    slices.push_back({begin, end - begin});
  }
  return slices;
}

void in_floats(const OnDevice& on, const Job& job,
               const std::function<void(float*, int64_t)>& reduce) {
  const Fragment& all = job.fragments.at(0);
  auto* data = reinterpret_cast<float*>(all.out);
  const bool half = job.dtype != DType::kF32;
  if (half) {
    data = reinterpret_cast<float*>(on.borrow(static_cast<size_t>(all.count) * sizeof(float)));
    gpu_decode(half_coding(job.dtype), all.in, all.count, data, on.device, on.stream);
  } else if (all.in != all.out) {
    on.device.copy(all.out, all.in, static_cast<size_t>(all.count) * sizeof(float), on.stream);
  }
  reduce(data, all.count);
  if (half)
    gpu_encode(half_coding(job.dtype), data, nullptr, all.count, all.out, on.device, on.stream);
}

void allreduce_floats(const OnDevice& on, const Job& job, float* data, int64_t count) {
  (job.coding->codec->sparse ? allreduce_sparse : allreduce_parts)(on, job, data, count);
}

void allreduce_coded(const OnDevice& on, const Job& job) {
  in_floats(on, job, [&](float* data, int64_t count) { allreduce_floats(on, job, data, count); });
}

}  // namespace bagua
