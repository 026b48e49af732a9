#include "sparse_bridge_ops.h"

#include "calls.h"
#include "errors.h"
#include "maps.h"

#include <cstring>
#include <unordered_map>
#include <utility>

namespace sparse_bridge {

std::string &last_message() {
  static thread_local std::string message;
  return message;
}

namespace {

using MaybeTensor = std::optional<Tensor>;

// ---- handles --------------------------------------------------------------------------------------

// A graph holds tensors, so maps and coordinates pass through it as int64 [1] that name them. The
// tensor's memory owns the object.
struct Handle {
  int64_t number; // what the tensor shows; graphs may write over it once they need it no more
  std::shared_ptr<const KernelMap> map;
  std::shared_ptr<Sites> sites;
};

struct Handles {
  std::mutex busy;
  int64_t next = 1;
  std::unordered_map<int64_t, Handle *> known;

  static Handles &all() {
    static Handles *one = new Handles; // tensors may outlive statics
    return *one;
  }
};

Tensor make(std::shared_ptr<const KernelMap> map, std::shared_ptr<Sites> sites) {
  Handles &all = Handles::all();
  Handle *made = new Handle{0, std::move(map), std::move(sites)};
  std::lock_guard<std::mutex> guard(all.busy);
  const int64_t number = made->number = all.next++;
  all.known[number] = made;
  const int64_t one = 1;
  auto forget = [number](void *memory) {
    Handles &from = Handles::all();
    {
      std::lock_guard<std::mutex> guard(from.busy);
      from.known.erase(number);
    }
    delete static_cast<Handle *>(memory);
  };
  static_assert(offsetof(Handle, number) == 0, "the tensor starts where its owner does");
  return torch::stable::from_blob(made, {&one, 1}, {&one, 1}, kCpu, ScalarType::Long, forget);
}

Handle &behind(const Tensor &handle) {
  const int64_t number = *static_cast<const int64_t *>(handle.const_data_ptr());
  Handles &all = Handles::all();
  std::lock_guard<std::mutex> guard(all.busy);
  auto found = all.known.find(number);
  if (found == all.known.end())
    fail("LifecycleError", "handle ", number, " stands for nothing in this process.");
  return *found->second;
}

const KernelMap &map_of(const Tensor &handle) {
  const Handle &found = behind(handle);
  if (!found.map) fail("LifecycleError", "handle ", found.number, " stands for no kernel map.");
  return *found.map;
}

// ---- coordinates and maps -------------------------------------------------------------------------

std::shared_ptr<Sites> enter(const Tensor &coords) {
  if (coords.dim() != 2 || coords.size(1) < 2)
    fail("ShapeError", "coordinates must be [N, 1 + D], batch first.");
  if (coords.scalar_type() != ScalarType::Int) fail("DataTypeError", "coordinates must be int32.");
  const Tensor rows = torch::stable::contiguous(coords);
  const int32_t *values = static_cast<const int32_t *>(rows.const_data_ptr());
  return std::make_shared<Sites>(Rows(values, values + rows.numel()), rows.size(1));
}

// The sites behind a handle, unless the visible coordinates were changed in place since.
std::shared_ptr<Sites> source(const Tensor &coords, const Tensor &handle, int64_t then,
                              int64_t now) {
  if (then != now) return enter(coords);
  const Handle &found = behind(handle);
  if (!found.sites) fail("LifecycleError", "handle ", found.number, " stands for no coordinates.");
  if (found.sites->n_rows() != coords.size(0))
    fail("KernelError", "a handle of ", found.sites->n_rows(), " coordinates came with ",
         coords.size(0), ".");
  return found.sites;
}

Tensor coordinates(Tensor coords) { return make(nullptr, enter(coords)); }

Tensor map(Tensor coords, Tensor handle, int64_t then, int64_t now, std::string builder,
           Numbers numbers) {
  return make(source(coords, handle, then, now)->ask(builder, numbers).map, nullptr);
}

Tensor visible(const Sites &sites) {
  Tensor coords = zeros({sites.n_rows(), sites.n_columns()}, ScalarType::Int);
  if (sites.n_rows())
    std::memcpy(coords.mutable_data_ptr(), sites.coords().data(), sites.coords().size() * 4);
  return coords;
}

std::tuple<Tensor, Tensor, Tensor> new_map(Tensor coords, Tensor handle, int64_t then, int64_t now,
                                           std::string builder, Numbers numbers, int64_t least) {
  const Sites::Made made = source(coords, handle, then, now)->ask(builder, numbers);
  if (!made.sites) fail("GeometryError", "a submanifold layer makes no new coordinates.");
  if (made.sites->n_rows() < least)
    fail("ShapeError", "a layer of this package made ", made.sites->n_rows(), " rows; it serves ",
         least, " and more of them. Leave such scenes out.");
  return {make(made.map, nullptr), visible(*made.sites), make(nullptr, made.sites)};
}

// ---- rows -----------------------------------------------------------------------------------------

Form form_of(const std::string &layout, int64_t groups, const std::string &dataflow,
             bool transposed) {
  if (!dataflow.empty() && dataflow != "auto" && dataflow != "per_offset")
    fail("UnsupportedError", "dataflow ", dataflow, "; packages compute per_offset on the CPU.");
  return {layout, groups, transposed};
}

Tensor conv(Tensor x, Tensor weight, MaybeTensor bias, int64_t, Tensor kmap, std::string layout,
            int64_t groups, std::string, std::string dataflow, bool transposed) {
  Epilogue end;
  end.bias = bias;
  return convolve(x, weight, map_of(kmap), form_of(layout, groups, dataflow, transposed), end);
}

Tensor conv_fused(Tensor x, Tensor weight, MaybeTensor bias, int64_t, Tensor kmap,
                  std::string layout, int64_t groups, std::string, std::string dataflow,
                  bool transposed, MaybeTensor mean, MaybeTensor var, MaybeTensor gain,
                  MaybeTensor beta, MaybeTensor residual, double eps,
                  std::optional<std::string> activation, double alpha) {
  const Epilogue end{bias, mean, var, gain, beta, residual, eps, activation, alpha};
  return convolve(x, weight, map_of(kmap), form_of(layout, groups, dataflow, transposed), end);
}

Tensor pool_rows(Tensor x, int64_t, Tensor kmap, std::string mode, double floor, bool transposed) {
  return pool(x, map_of(kmap), mode, floor, transposed);
}

Tensor pool_items(Tensor x, Tensor items, int64_t n_items, std::string mode) {
  return global_pool(x, items, n_items, mode);
}

Tensor grid(Tensor x, Tensor coords, Numbers shape, bool channels_first, bool last_wins,
            int64_t then, int64_t now) {
  return to_dense(x, coords, shape, channels_first, last_wins, then != now);
}

// ---- registration ---------------------------------------------------------------------------------

#define SITES "Tensor coords, Tensor handle, SymInt then, SymInt now, str builder, SymInt[] numbers"
#define FORM "Tensor kmap, str layout, int groups, str precision, str dataflow, bool transposed"

struct Operator {
  const char *name, *schema;
  void (*run)(StableIValue *, uint64_t, uint64_t);
};

// Names and schemas are those of `sparse_bridge/core/compile`.
const Operator kOperators[] = {
    {"coordinates", "(Tensor coords) -> Tensor", TORCH_BOX(&coordinates)},
    {"map", "(" SITES ") -> Tensor", TORCH_BOX(&map)},
    {"new_map", "(" SITES ", int least) -> (Tensor, Tensor, Tensor)", TORCH_BOX(&new_map)},
    {"conv", "(Tensor x, Tensor weight, Tensor? bias, SymInt rows, " FORM ") -> Tensor",
     TORCH_BOX(&conv)},
    {"conv_fused",
     "(Tensor x, Tensor weight, Tensor? bias, SymInt rows, " FORM ", Tensor? mean, Tensor? var, "
     "Tensor? gain, Tensor? beta, Tensor? residual, float eps, str? activation, float alpha) "
     "-> Tensor",
     TORCH_BOX(&conv_fused)},
    {"pool",
     "(Tensor x, SymInt rows, Tensor kmap, str mode, float floor, bool transposed) -> Tensor",
     TORCH_BOX(&pool_rows)},
    {"global_pool", "(Tensor x, Tensor items, SymInt n_items, str mode) -> Tensor",
     TORCH_BOX(&pool_items)},
    {"to_dense",
     "(Tensor x, Tensor coords, SymInt[] shape, bool channels_first, bool last_wins, SymInt then, "
     "SymInt now) -> Tensor",
     TORCH_BOX(&grid)},
};

// False where the first operator is there already.
bool register_all() {
  TorchLibraryHandle library = nullptr;
  aoti_torch_library_init_fragment("sparse_bridge", __FILE__, __LINE__, &library);
  for (const Operator &one : kOperators) {
    const std::string schema = std::string(one.name) + one.schema;
    const bool made = aoti_torch_library_def(library, schema.c_str()) == TORCH_SUCCESS;
    if (!made && &one == kOperators) return false;
    STD_TORCH_CHECK(made, "torch refused the operator ", schema);
  }
  TorchLibraryHandle cpu = nullptr;
  aoti_torch_library_init_impl("sparse_bridge", "CPU", __FILE__, __LINE__, &cpu);
  for (const Operator &one : kOperators)
    TORCH_ERROR_CODE_CHECK(torch_library_impl(cpu, one.name, one.run, TORCH_ABI_VERSION));
  return true; // the libraries stay: programs end with packages that call operators
}

} // namespace

bool load() {
  static const bool mine = register_all();
  return mine;
}

const char *last_error() {
  static thread_local std::string asked;
  asked = std::exchange(last_message(), {});
  return asked.c_str();
}

namespace {
const bool kLoaded = load(); // `torch.ops.load_library` and `dlopen` call nothing
} // namespace

} // namespace sparse_bridge
