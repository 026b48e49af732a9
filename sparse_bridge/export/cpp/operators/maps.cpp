#include "maps.h"

#include "errors.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <numeric>

namespace sparse_bridge {

namespace {

constexpr int64_t kGrain = 4096; // rows of a thread, at least

} // namespace

// ---- look-up ------------------------------------------------------------------------------------

// Cells of the keys 0 .. and the numbers that they were given, in the order of insertion.
class Table {
public:
  explicit Table(int64_t n_keys) {
    int bits = 6;
    while ((int64_t(1) << bits) < 2 * n_keys) ++bits;
    shift_ = 64 - bits;
    mask_ = (uint64_t(1) << bits) - 1;
    keys_.assign(mask_ + 1, -1);
    numbers_.resize(mask_ + 1);
  }

  // The number of `key`: `number`, unless it has one.
  int32_t insert(int64_t key, int32_t number) {
    const uint64_t slot = slot_of(key);
    if (keys_[slot] < 0) {
      keys_[slot] = key;
      numbers_[slot] = number;
    }
    return numbers_[slot];
  }

  int32_t find(int64_t key) const {
    const uint64_t slot = slot_of(key);
    return keys_[slot] < 0 ? -1 : numbers_[slot];
  }

private:
  // Where `key` is, or where it belongs.
  uint64_t slot_of(int64_t key) const {
    uint64_t slot = (uint64_t(key) * 0x9E3779B97F4A7C15u) >> shift_;
    while (keys_[slot] >= 0 && keys_[slot] != key) slot = (slot + 1) & mask_;
    return slot;
  }

  int shift_;
  uint64_t mask_;
  std::vector<int64_t> keys_;
  Rows numbers_;
};

class Index {
public:
  Index(const Rows &coords, int64_t n_rows, const Numbers &grid)
      : columns(int64_t(grid.size())), table(n_rows), keys(n_rows), steps(steps_of(grid)) {
    for (int64_t row = 0; row < n_rows; ++row) {
      keys[row] = key_of(&coords[row * columns], grid);
      if (keys[row] < 0) continue;
      const bool first = table.insert(keys[row], int32_t(row)) == row;
      if (first) firsts.push_back(int32_t(row));
      distinct = distinct && first;
    }
  }

  int64_t columns;
  Table table;  // from cells to the first row of each
  Numbers keys; // of every row, -1 for rows outside of the grid
  Numbers steps;
  Rows firsts; // the first row of every coordinate, ascending
  bool distinct = true;

private:
  int64_t key_of(const int32_t *coord, const Numbers &grid) const {
    int64_t key = 0;
    for (int64_t c = 0; c < columns; ++c) {
      if (coord[c] < 0 || coord[c] >= grid[c]) return -1;
      key += coord[c] * steps[c];
    }
    return key;
  }
};

// ---- sites --------------------------------------------------------------------------------------

Sites::Sites(Rows coords, int64_t n_columns)
    : coords_(std::move(coords)), n_columns_(n_columns),
      n_rows_(int64_t(coords_.size()) / n_columns) {}

Sites::~Sites() = default;

const Index &Sites::index(const Numbers &grid) {
  std::unique_ptr<Index> &found = indices_[grid];
  if (!found) found = std::make_unique<Index>(coords_, n_rows_, grid);
  return *found;
}

Sites::Made Sites::ask(const std::string &builder, const Numbers &numbers) {
  std::lock_guard<std::mutex> guard(busy_);
  auto known = made_.find(numbers);
  if (known != made_.end()) return known->second;
  const Layer layer = Layer::of(builder, numbers);
  if (layer.n_axes + 1 != n_columns_)
    fail("GeometryError", "a layer of ", layer.n_axes, " dimensions got coordinates of ",
         n_columns_, " columns; expected the batch index and one per dimension.");
  Made made = layer.subm ? submanifold(layer) : expanded(layer);
  return made_.emplace(numbers, std::move(made)).first->second;
}

namespace {

// The rows that `offset` leads to, from every row. Of equal coordinates all look up, and the first
// one is found.
Pairs looked_up(const Rows &coords, const Index &index, const Numbers &grid,
                const Numbers &offset) {
  Pairs found;
  int64_t distance = 0;
  for (size_t a = 0; a < offset.size(); ++a) distance += offset[a] * index.steps[a + 1];
  const int64_t n_rows = int64_t(index.keys.size());
  for (int64_t row = 0; row < n_rows; ++row) {
    if (index.keys[row] < 0) continue;
    const int32_t *coord = &coords[row * index.columns];
    bool inside = true;
    for (size_t a = 0; a < offset.size() && inside; ++a)
      inside = uint64_t(coord[a + 1] + offset[a]) < uint64_t(grid[a + 1]);
    const int32_t hit = inside ? index.table.find(index.keys[row] + distance) : -1;
    if (hit < 0) continue;
    found.in.push_back(hit);
    found.out.push_back(int32_t(row));
  }
  return found;
}

} // namespace

Sites::Made Sites::submanifold(const Layer &layer) {
  const Index &here = index(layer.grid);
  const auto offsets = layer.offsets();
  const int64_t n_offsets = int64_t(offsets.size()), center = n_offsets / 2;
  auto map = std::make_shared<KernelMap>();
  map->n_in = map->n_out = n_rows_;
  map->whole = center;
  map->inputs_distinct = here.distinct;
  map->pairs.resize(n_offsets);
  // Odd kernels: offset V - 1 - v is the negative of offset v, and its pairs are those reversed.
  const int64_t looked = here.distinct ? center : n_offsets;
  torch::stable::parallel_for(0, looked, 1, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v)
      if (v != center) map->pairs[v] = looked_up(coords_, here, layer.grid, offsets[v]);
  });
  for (int64_t v = looked; v < n_offsets; ++v)
    if (v != center)
      map->pairs[v] = {map->pairs[n_offsets - 1 - v].out, map->pairs[n_offsets - 1 - v].in};
  return {map, nullptr};
}

namespace {

// Which cells rows reach, in the order of rows and then of offsets.
struct Reached {
  Numbers keys;
  Rows rows, which;
};

class Reach {
public:
  explicit Reach(const Layer &layer)
      : layer_(layer), offsets_(layer.offsets()), grid_(layer.output_grid()),
        steps_(steps_of(grid_)) {}

  // Of the rows from `begin` to `end` of `firsts`; `which` counts rows from the first one.
  void add(const Rows &coords, const Rows &firsts, int64_t begin, int64_t end,
           Reached &found) const {
    for (int64_t number = begin; number < end; ++number) {
      const int32_t *coord = &coords[firsts[number] * steps_.size()];
      if (coord[0] >= grid_[0]) continue;
      for (size_t v = 0; v < offsets_.size(); ++v) {
        const int64_t key = key_of(coord, offsets_[v]);
        if (key < 0) continue;
        found.keys.push_back(key);
        found.rows.push_back(int32_t(number));
        found.which.push_back(int32_t(v));
      }
    }
  }

private:
  // Strided layers gather c = s * u + o, transposed ones spread to s * c + o.
  int64_t key_of(const int32_t *coord, const Numbers &offset) const {
    int64_t key = coord[0] * steps_[0];
    for (int64_t a = 0; a < layer_.n_axes; ++a) {
      const int64_t stride = layer_.stride[a], c = coord[a + 1];
      int64_t cell = layer_.transposed ? c * stride + offset[a] : c - offset[a];
      if (!layer_.transposed) {
        if (cell % stride) return -1;
        cell /= stride;
      }
      if (cell < 0 || cell >= grid_[a + 1]) return -1;
      key += cell * steps_[a + 1];
    }
    return key;
  }

  const Layer &layer_;
  std::vector<Numbers> offsets_;
  Numbers grid_, steps_;
};

Reached reached_by(const Layer &layer, const Rows &coords, const Rows &firsts) {
  const Reach reach(layer);
  const int64_t n_rows = int64_t(firsts.size()), lots = (n_rows + kGrain - 1) / kGrain;
  std::vector<Reached> parts(lots);
  torch::stable::parallel_for(0, lots, 1, [&](int64_t begin, int64_t end) {
    for (int64_t lot = begin; lot < end; ++lot)
      reach.add(coords, firsts, lot * kGrain, std::min(n_rows, (lot + 1) * kGrain), parts[lot]);
  });
  Reached every;
  for (const Reached &part : parts) {
    every.keys.insert(every.keys.end(), part.keys.begin(), part.keys.end());
    every.rows.insert(every.rows.end(), part.rows.begin(), part.rows.end());
    every.which.insert(every.which.end(), part.which.begin(), part.which.end());
  }
  return every;
}

// The place of every new row, numbered as first seen, in the order that a layer wants.
Rows places_in(Layer::Order order, const Numbers &keys, const Reached &every, const Rows &numbers) {
  Rows rows(keys.size());
  std::iota(rows.begin(), rows.end(), 0);
  if (order == Layer::ascending) {
    std::sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) { return keys[a] < keys[b]; });
  } else if (order == Layer::by_offset) {
    const int64_t n_pairs = int64_t(numbers.size());
    Numbers first(keys.size(), -1); // the offset of the first pair of each, then its place
    for (int64_t i = 0; i < n_pairs; ++i) {
      const int64_t at = every.which[i] * n_pairs + i;
      int64_t &known = first[numbers[i]];
      known = known < 0 ? at : std::min(known, at);
    }
    std::sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) { return first[a] < first[b]; });
  }
  Rows places(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) places[rows[i]] = int32_t(i);
  return places;
}

Rows coords_of(const Numbers &keys, const Rows &places, const Numbers &grid) {
  const Numbers steps = steps_of(grid);
  const size_t columns = grid.size();
  Rows coords(keys.size() * columns);
  for (size_t i = 0; i < keys.size(); ++i) {
    int64_t rest = keys[i];
    for (size_t c = 0; c < columns; ++c) {
      coords[places[i] * columns + c] = int32_t(rest / steps[c]);
      rest %= steps[c];
    }
  }
  return coords;
}

std::shared_ptr<const Fold> fold_of(const Index &index) {
  auto fold = std::make_shared<Fold>();
  fold->n_distinct = int64_t(index.firsts.size());
  Rows number(index.keys.size(), -1);
  for (size_t i = 0; i < index.firsts.size(); ++i) number[index.firsts[i]] = int32_t(i);
  for (int64_t key : index.keys)
    fold->place.push_back(key < 0 ? -1 : number[index.table.find(key)]);
  return fold;
}

} // namespace

Sites::Made Sites::expanded(const Layer &layer) {
  const Numbers out_grid = layer.output_grid();
  const Index &here = index(layer.grid);
  const Reached every = reached_by(layer, coords_, here.firsts);
  const int64_t n_pairs = int64_t(every.keys.size());
  Table table(n_pairs);
  Numbers keys;
  Rows numbers(n_pairs);
  for (int64_t i = 0; i < n_pairs; ++i) {
    numbers[i] = table.insert(every.keys[i], int32_t(keys.size()));
    if (numbers[i] == int64_t(keys.size())) keys.push_back(every.keys[i]);
  }
  const Rows places = places_in(layer.order, keys, every, numbers);
  auto map = std::make_shared<KernelMap>();
  map->n_in = here.distinct ? n_rows_ : int64_t(here.firsts.size());
  map->n_out = int64_t(keys.size());
  map->pairs.resize(layer.offsets().size());
  for (int64_t i = 0; i < n_pairs; ++i) {
    Pairs &pairs = map->pairs[every.which[i]];
    pairs.in.push_back(here.distinct ? here.firsts[every.rows[i]] : every.rows[i]);
    pairs.out.push_back(places[numbers[i]]);
  }
  if (!here.distinct) map->fold = fold_of(here);
  return {map, std::make_shared<Sites>(coords_of(keys, places, out_grid), n_columns_)};
}

} // namespace sparse_bridge
