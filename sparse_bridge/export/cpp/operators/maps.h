// Kernel maps of spconv's layers: which input row meets which output row at which kernel offset.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sparse_bridge {

using Numbers = std::vector<int64_t>;
using Rows = std::vector<int32_t>;

// What decides a layer's map besides its input, as the graph holds it.
struct Layer {
  enum Order { first_seen, ascending, by_offset };

  int64_t n_axes;
  bool subm, transposed;
  Order order;
  Numbers kernel, stride, padding, dilation, more;
  Numbers grid; // batch size, then the cells of every axis

  static Layer of(const std::string &builder, const Numbers &numbers);
  Numbers output_grid() const;
  // Offsets [V][D] in the order of the weight, the last axis fastest.
  std::vector<Numbers> offsets() const;
};

// What a cell's key gains per step along each column, row-major.
Numbers steps_of(const Numbers &grid);

// Rows of equal coordinates as one. place: the distinct coordinate of every row, -1 for rows
// outside of the grid.
struct Fold {
  int64_t n_distinct;
  Rows place;
};

// The pairs of one offset. No list names an output row twice.
struct Pairs {
  Rows in, out;
};

// n_in, n_out: rows at both ends, distinct ones where there is a fold.  whole: the offset that pairs
// every row with itself, -1 if none; it has no list.  fold: of the input's rows.
struct KernelMap {
  int64_t n_in, n_out, whole = -1;
  std::vector<Pairs> pairs;
  std::shared_ptr<const Fold> fold;
  bool inputs_distinct = true; // whether no list names an input row twice
};

// Distinct rows of a grid by hash: of equal coordinates the first one counts.
class Index;

// Coordinates [N, 1 + D], batch first, and all maps over them.
class Sites {
public:
  Sites(Rows coords, int64_t n_columns);
  ~Sites();

  struct Made {
    std::shared_ptr<const KernelMap> map;
    std::shared_ptr<Sites> sites; // of new coordinates
  };

  // The map of a layer, built once.
  Made ask(const std::string &builder, const Numbers &numbers);

  int64_t n_rows() const { return n_rows_; }
  int64_t n_columns() const { return n_columns_; }
  const Rows &coords() const { return coords_; }

private:
  const Index &index(const Numbers &grid);
  Made submanifold(const Layer &layer);
  Made expanded(const Layer &layer);

  Rows coords_;
  int64_t n_columns_, n_rows_;
  std::mutex busy_;
  std::map<Numbers, Made> made_;
  std::map<Numbers, std::unique_ptr<Index>> indices_;
};

} // namespace sparse_bridge
