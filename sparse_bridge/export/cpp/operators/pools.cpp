#include "products.h"

#include "calls.h"
#include "errors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace sparse_bridge {

namespace {

enum class Mode { max, avg, sum };

Mode mode_of(const std::string &name) {
  if (name == "max") return Mode::max;
  if (name == "avg") return Mode::avg;
  if (name == "sum") return Mode::sum;
  fail("UnsupportedError", "pooling mode ", name, "; packages hold max, avg and sum.");
}

// A NaN is larger than any number, as in torch.
template <class T> T larger(T a, T b) { return b > a || std::isnan(b) ? b : a; }

// Row to[i] of y becomes its sum or maximum with row from[i] of x.
template <class T>
void gather(const Tensor &x, const Rows &from, const Tensor &y, const Rows &to, Mode mode) {
  const int64_t n = x.size(1);
  for (size_t i = 0; i < from.size(); ++i) {
    if (to[i] < 0) continue;
    const T *source = values_of<T>(x) + from[i] * n;
    T *target = values_of<T>(y) + to[i] * n;
    for (int64_t c = 0; c < n; ++c)
      target[c] = mode == Mode::max ? larger(target[c], source[c]) : target[c] + source[c];
  }
}

void gathered(const Tensor &x, const Rows &from, const Tensor &y, const Rows &to, Mode mode) {
  if (x.scalar_type() == ScalarType::Double)
    gather<double>(x, from, y, to, mode);
  else
    gather<float>(x, from, y, to, mode);
}

Tensor full(int64_t rows, int64_t columns, double value, ScalarType dtype) {
  const int64_t sizes[] = {rows, columns};
  return torch::stable::full({sizes, 2}, value, dtype, std::nullopt, kCpu);
}

Rows every_row(int64_t count) {
  Rows rows(count);
  for (int64_t i = 0; i < count; ++i) rows[i] = int32_t(i);
  return rows;
}

// Rows of y by counts [N, 1], of which 0 counts as 1.
Tensor divided(const Tensor &y, const Tensor &counts) {
  const int64_t n = y.size(1);
  auto divide = [&](auto *sums, const auto *many) {
    for (int64_t i = 0; i < y.numel(); ++i) sums[i] /= many[i / n] > 1 ? many[i / n] : 1;
  };
  if (y.scalar_type() == ScalarType::Double)
    divide(values_of<double>(y), values_of<double>(counts));
  else
    divide(values_of<float>(y), values_of<float>(counts));
  return y;
}

// Of distinct rows, in the dtype of sums.
Tensor pooled(const Tensor &x, const KernelMap &map, Mode mode, double floor, bool backwards) {
  const int64_t n_out = backwards ? map.n_in : map.n_out;
  Tensor y = full(n_out, x.size(1), mode == Mode::max ? floor : 0.0, x.scalar_type());
  const Rows all = map.whole < 0 ? Rows{} : every_row(map.n_out);
  for (size_t v = 0; v < map.pairs.size(); ++v) {
    const Pairs &pairs = map.pairs[v];
    if (int64_t(v) == map.whole)
      gathered(x, all, y, all, mode);
    else if (backwards)
      gathered(x, pairs.out, y, pairs.in, mode);
    else
      gathered(x, pairs.in, y, pairs.out, mode);
  }
  return y;
}

Tensor folded(const Tensor &x, const Fold &fold, Mode mode) {
  const double start = mode == Mode::max ? -std::numeric_limits<double>::infinity() : 0.0;
  Tensor y = full(fold.n_distinct, x.size(1), start, x.scalar_type());
  gathered(x, every_row(x.size(0)), y, fold.place, mode);
  return y;
}

} // namespace

Tensor sum_rows(const Tensor &x, const Fold &fold) {
  const Tensor rows = in_dtype(torch::stable::contiguous(x), accumulator(x));
  return in_dtype(folded(rows, fold, Mode::sum), x.scalar_type());
}

Tensor pool(const Tensor &given, const KernelMap &map, const std::string &name, double floor,
            bool transposed) {
  const Mode mode = mode_of(name);
  if (map.fold && transposed)
    fail("UnsupportedError", "a pool backwards over equal coordinates; make them distinct first.");
  const int64_t n_in = transposed ? map.n_out
                       : map.fold ? int64_t(map.fold->place.size())
                                  : map.n_in;
  if (given.dim() != 2 || given.size(0) != n_in)
    fail("ShapeError", "features have ", given.size(0), " rows, the kernel map was built for ",
         n_in, ".");
  const ScalarType dtype = given.scalar_type();
  const Tensor x = in_dtype(torch::stable::contiguous(given), accumulator(given));
  // Folded rows are rounded as separate operations round them.
  auto rounded = [&](const Tensor &y) { return in_dtype(in_dtype(y, dtype), x.scalar_type()); };
  auto run = [&](const Tensor &rows, Mode way) {
    if (!map.fold) return pooled(rows, map, way, floor, transposed);
    return rounded(pooled(rounded(folded(rows, *map.fold, way)), map, way, floor, false));
  };
  if (mode != Mode::avg) return in_dtype(run(x, mode), dtype);
  const Tensor ones = full(x.size(0), 1, 1.0, x.scalar_type());
  return in_dtype(divided(run(x, Mode::sum), run(ones, Mode::sum)), dtype);
}

Tensor global_pool(const Tensor &given, const Tensor &items, int64_t n_items,
                   const std::string &name) {
  const Mode mode = mode_of(name);
  if (given.dim() != 2 || items.dim() != 1 || items.size(0) != given.size(0))
    fail("ShapeError", "expected features [N, C] and batch indices [N].");
  const Tensor x = in_dtype(torch::stable::contiguous(given), accumulator(given));
  const Tensor wide = torch::stable::contiguous(in_dtype(items, ScalarType::Long));
  const int64_t *batch = values_of<int64_t>(wide);
  Rows places(x.size(0));
  std::vector<bool> met(n_items, false);
  for (int64_t row = 0; row < x.size(0); ++row) {
    const bool inside = batch[row] >= 0 && batch[row] < n_items;
    places[row] = inside ? int32_t(batch[row]) : -1;
    if (inside) met[batch[row]] = true;
  }
  const Fold fold{n_items, places};
  Tensor y = folded(x, fold, mode);
  if (mode == Mode::avg)
    y = divided(y, folded(full(x.size(0), 1, 1.0, x.scalar_type()), fold, Mode::sum));
  const int64_t size = x.size(1) * int64_t(y.element_size());
  for (int64_t item = 0; item < n_items; ++item) // those without rows
    if (!met[item]) std::memset(values_of<char>(y) + item * size, 0, size);
  return in_dtype(y, given.scalar_type());
}

// ---- dense grids ----------------------------------------------------------------------------------

namespace {

// The cell of a coordinate, row-major; -1 outside.
int64_t cell_of(const int32_t *coord, const Numbers &shape, bool from_end) {
  int64_t cell = 0;
  for (size_t c = 0; c < shape.size(); ++c) {
    const int64_t at = coord[c] < 0 && from_end ? coord[c] + shape[c] : coord[c];
    if (at < 0 || at >= shape[c]) return -1;
    cell = cell * shape[c] + at;
  }
  return cell;
}

template <class Value>
void scatter(const Tensor &x, const Numbers &cells, const Tensor &y, int64_t n_inner,
             bool channels_first) {
  const int64_t channels = x.size(1);
  const Value *from = values_of<Value>(x);
  Value *to = values_of<Value>(y);
  for (size_t row = 0; row < cells.size(); ++row) {
    const int64_t item = cells[row] / n_inner, inner = cells[row] % n_inner;
    const int64_t first =
        channels_first ? item * channels * n_inner + inner : cells[row] * channels;
    const int64_t step = channels_first ? n_inner : 1;
    for (int64_t c = 0; c < channels; ++c) to[first + c * step] = from[row * channels + c];
  }
}

} // namespace

Tensor to_dense(const Tensor &given, const Tensor &where, const Numbers &shape, bool channels_first,
                bool last_wins, bool checked) {
  const Tensor x = torch::stable::contiguous(given);
  const Tensor coords = torch::stable::contiguous(in_dtype(where, ScalarType::Int));
  const int64_t n_rows = coords.size(0);
  if (coords.size(1) != int64_t(shape.size()) || x.size(0) != n_rows)
    fail("ShapeError", "expected one row of features per coordinate, and a size per column.");
  Numbers cells(n_rows);
  for (int64_t row = 0; row < n_rows; ++row) {
    const int32_t *coord = values_of<int32_t>(coords) + row * int64_t(shape.size());
    cells[row] = cell_of(coord, shape, !last_wins);
    if (cells[row] < 0)
      fail("CoordinateError", "row ", row, " is at ", listed(Rows(coord, coord + shape.size())),
           ", outside of the grid ", listed(shape),
           checked ? "; correct the coordinates or the grid first." : ".");
  }
  Numbers sizes = shape;
  sizes.insert(channels_first ? sizes.begin() + 1 : sizes.end(), x.size(1));
  Tensor y = zeros(sizes, x.scalar_type());
  int64_t n_inner = 1;
  for (size_t c = 1; c < shape.size(); ++c) n_inner *= shape[c];
  switch (x.element_size()) {
  case 2:
    scatter<uint16_t>(x, cells, y, n_inner, channels_first);
    break;
  case 4:
    scatter<uint32_t>(x, cells, y, n_inner, channels_first);
    break;
  default:
    scatter<uint64_t>(x, cells, y, n_inner, channels_first);
    break;
  }
  return y;
}

} // namespace sparse_bridge
