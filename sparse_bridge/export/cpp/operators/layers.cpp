#include "maps.h"

#include "errors.h"

namespace sparse_bridge {

namespace {

constexpr int64_t kMostCells = int64_t(1) << 62; // that keys tell apart

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

void check_cells(const Numbers &grid) {
  int64_t cells = 1;
  for (int64_t size : grid) {
    if (size < 0) fail("GeometryError", "a grid of ", listed(grid), "; expected 0 or more cells.");
    if (size && cells > kMostCells / size)
      fail("OverflowLimitError", "a grid of ", listed(grid), " has more than 2^62 cells.");
    cells *= size;
  }
}

} // namespace

Numbers steps_of(const Numbers &grid) {
  Numbers steps(grid.size(), 1);
  for (size_t i = grid.size() - 1; i-- > 0;) steps[i] = steps[i + 1] * grid[i + 1];
  return steps;
}

Layer Layer::of(const std::string &builder, const Numbers &numbers) {
  if (builder != "spconv")
    fail("UnsupportedError", "maps of ", builder,
         "; packages hold those of spconv's layers. Run the program in Python.");
  const int64_t n_axes = numbers.empty() ? 0 : numbers[0];
  if (n_axes < 1 || int64_t(numbers.size()) != 4 + 5 * n_axes + 1 + n_axes || numbers[3] < 0 ||
      numbers[3] > by_offset)
    fail("GeometryError", "a map is asked for by ", listed(numbers), "; was it packaged for ",
         "another release of sparse_bridge? Package the model again.");
  auto at = numbers.begin() + 4;
  auto next = [&at](int64_t count) { return at += count, Numbers(at - count, at); };
  Layer layer{n_axes, numbers[1] != 0, numbers[2] != 0, Order(numbers[3]), {}, {}, {}, {}, {}, {}};
  layer.kernel = next(n_axes);
  layer.stride = next(n_axes);
  layer.padding = next(n_axes);
  layer.dilation = next(n_axes);
  layer.more = next(n_axes);
  layer.grid = next(1 + n_axes);
  check_cells(layer.grid);
  return layer;
}

Numbers Layer::output_grid() const {
  Numbers out = grid;
  for (int64_t a = 0; a < n_axes && !subm; ++a) {
    const int64_t size = grid[a + 1];
    const int64_t reach = 2 * padding[a] - dilation[a] * (kernel[a] - 1) - 1;
    // spconv leaves the dilation out of transposed layers.
    out[a + 1] = transposed ? (size - 1) * stride[a] - 2 * padding[a] + kernel[a] + more[a]
                            : floor_div(size + reach, stride[a]) + 1;
  }
  check_cells(out);
  return out;
}

std::vector<Numbers> Layer::offsets() const {
  std::vector<Numbers> found{{}};
  for (int64_t a = 0; a < n_axes; ++a) {
    const int64_t origin = subm ? kernel[a] / 2 * dilation[a] : padding[a];
    std::vector<Numbers> longer;
    for (const Numbers &one : found)
      for (int64_t r = 0; r < kernel[a]; ++r) {
        longer.push_back(one);
        longer.back().push_back(r * dilation[a] - origin);
      }
    found = std::move(longer);
  }
  return found;
}

} // namespace sparse_bridge
