// Convolutions and pools over kernel maps, on tensors of torch's stable ABI.

#pragma once

#include "maps.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

namespace sparse_bridge {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// How a layer reads its weight, and whether its map runs backwards; see `ConvForm` in Python.
struct Form {
  std::string layout;
  int64_t groups;
  bool transposed;
};

// What follows the sum: see `Epilogue` in Python.
struct Epilogue {
  std::optional<Tensor> bias, mean, var, gain, beta, residual;
  double eps = 0.0;
  std::optional<std::string> activation;
  double alpha = 0.0;
};

Tensor convolve(const Tensor &x, const Tensor &weight, const KernelMap &map, const Form &form,
                const Epilogue &end);

// [N, C] -> [U, C]: sums of the rows of each distinct coordinate, in the order of rows.
Tensor sum_rows(const Tensor &x, const Fold &fold);

// mode: "max", "avg" or "sum".  floor: what "max" gives at least.
Tensor pool(const Tensor &x, const KernelMap &map, const std::string &mode, double floor,
            bool transposed);

// Maximum, mean or sum of the rows of each batch item.
Tensor global_pool(const Tensor &x, const Tensor &items, int64_t n_items, const std::string &mode);

// Zeros [B, C, ...] or [B, ..., C] with the rows of x at their coordinates.  checked: coordinates
// may lie outside; negative ones then count from the end, as in Python, unless `last_wins`.
Tensor to_dense(const Tensor &x, const Tensor &coords, const Numbers &shape, bool channels_first,
                bool last_wins, bool checked);

} // namespace sparse_bridge
