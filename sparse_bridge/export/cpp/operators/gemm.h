// Products of gathered rows by torch's matrix product, whose rows keep their bits.
//
// A row has the same bits wherever it stands and however many rows there are, as in Python
// (`core/conv/host_products.py`): libraries give the last rows of a product, and few rows, other
// bits, so products are filled up. What a shape takes is tried once.

#pragma once

#include "calls.h"

#include <algorithm>
#include <mutex>
#include <random>
#include <tuple>

namespace sparse_bridge {

constexpr int64_t kBlock = 4096; // rows of a product: what it reads and writes stays in a cache
constexpr int64_t kStep = 16;    // rows that kernels of libraries take in whole steps
constexpr int64_t kMost = 512;   // rows from which on no library divides a sum of a row

inline int64_t rounded(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Products of at least `rows` rows, with matrices whose sides are multiples of `unit`.
struct Shape {
  int64_t rows, unit;
};

template <class T> class Trial {
public:
  Trial(int64_t k, int64_t n, bool turned) {
    for (int64_t unit : {int64_t(1), int64_t(16 / sizeof(T)), int64_t(64 / sizeof(T))}) {
      k_ = rounded(k, unit), n_ = rounded(n, unit);
      fill(turned);
      found_ = {first_height(), unit};
      if (rows_alike()) return;
    }
  }

  Shape found() const { return found_; }

private:
  void fill(bool turned) {
    x_ = zeros({kMost, k_}, dtype());
    Tensor w = zeros({k_, n_}, dtype());
    std::mt19937 make(0);
    std::normal_distribution<T> normal;
    for (const Tensor &one : {x_, w}) {
      T *values = static_cast<T *>(one.mutable_data_ptr());
      for (int64_t i = 0; i < one.numel(); ++i) values[i] = normal(make);
    }
    memory_ = w;
    T *values = static_cast<T *>(w.mutable_data_ptr());
    w_ = matrix_at(values, k_, n_, turned ? 1 : n_, turned ? k_ : 1);
  }

  static constexpr ScalarType dtype() {
    return sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
  }

  Tensor product(const Tensor &x, int64_t rows) const {
    const T *values = static_cast<const T *>(x.const_data_ptr());
    Tensor out = zeros({rows, n_}, dtype());
    return call("aten::mm", "out", matrix_at(values, rows, k_, k_, 1), w_, out);
  }

  // The fewest rows whose bits are those that they have among many.
  int64_t first_height() const {
    const Tensor many = product(x_, kMost);
    int64_t rows = kStep;
    while (rows < kMost && !same(product(x_, rows), many, rows)) rows *= 2;
    return rows;
  }

  bool same(const Tensor &a, const Tensor &b, int64_t rows) const {
    const T *left = static_cast<const T *>(a.const_data_ptr());
    return std::equal(left, left + rows * n_, static_cast<const T *>(b.const_data_ptr()));
  }

  // Whether equal rows have equal bits wherever they stand.
  bool rows_alike() const {
    T *values = static_cast<T *>(x_.mutable_data_ptr());
    for (int64_t row = 1; row < kMost; ++row) std::copy(values, values + k_, values + row * k_);
    const Tensor made = product(x_, kMost);
    const T *rows = static_cast<const T *>(made.const_data_ptr());
    for (int64_t row = 1; row < kMost; ++row)
      if (!std::equal(rows, rows + n_, rows + row * n_)) return false;
    return true;
  }

  int64_t k_, n_;
  Tensor x_, w_, memory_;
  Shape found_;
};

template <class T> Shape shape_of(int64_t k, int64_t n, bool turned) {
  static std::mutex busy;
  static std::map<std::tuple<int64_t, int64_t, bool, uint32_t>, Shape> known;
  const auto key = std::make_tuple(k, n, turned, torch::stable::get_num_threads());
  std::lock_guard<std::mutex> guard(busy);
  auto found = known.find(key);
  if (found == known.end()) found = known.emplace(key, Trial<T>(k, n, turned).found()).first;
  return found->second;
}

// The matrices of one group: w[v, i, o] at data + v * step_v + i * step_i + o * step_o.
template <class T> struct Stack {
  const T *data;
  int64_t step_v, step_i, step_o, k, n;
};

// Gathers rows and multiplies them by the matrix of an offset, up to kBlock rows at a time.
template <class T> class Multiplier {
public:
  // longest: most rows that an offset multiplies.
  Multiplier(const Stack<T> &stack, const T *x, int64_t step_x, int64_t longest)
      : stack_(stack), x_(x), step_x_(step_x), height_(std::clamp(longest, kMost, kBlock)),
        shape_(shape_of<T>(stack.k, stack.n, stack.step_i <= stack.step_o)),
        k_(rounded(stack.k, shape_.unit)), n_(rounded(stack.n, shape_.unit)),
        rows_(zeros({rounded(height_, kStep), k_}, dtype())),
        products_(zeros({rounded(height_, kStep), n_}, dtype())) {}

  void turn_to(int64_t v) {
    const T *data = stack_.data + v * stack_.step_v;
    if (shape_.unit == 1) {
      matrix_ = matrix_at(data, k_, n_, stack_.step_i, stack_.step_o);
      return;
    }
    matrix_ = zeros({k_, n_}, dtype());
    T *values = static_cast<T *>(matrix_.mutable_data_ptr());
    for (int64_t i = 0; i < stack_.k; ++i)
      for (int64_t o = 0; o < stack_.n; ++o)
        values[i * n_ + o] = data[i * stack_.step_i + o * stack_.step_o];
  }

  // The products of the rows x[row(i)] for i < count <= kBlock, one every `width()` values.
  template <class Row> const T *products(int64_t count, const Row &row) {
    T *rows = static_cast<T *>(rows_.mutable_data_ptr());
    T *results = static_cast<T *>(products_.mutable_data_ptr());
    torch::stable::parallel_for(0, count, grain(stack_.k), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T *from = x_ + row(i) * step_x_;
        std::copy(from, from + stack_.k, rows + i * k_);
      }
    });
    const int64_t height = std::max(shape_.rows, rounded(count, kStep)); // the rest is scrap
    call("aten::mm", "out", matrix_at<const T>(rows, height, k_, k_, 1), matrix_,
         matrix_at(results, height, n_, n_, 1));
    return results;
  }

  int64_t width() const { return n_; }

  static int64_t grain(int64_t columns) { return std::max<int64_t>(1, 16384 / columns); }

private:
  static constexpr ScalarType dtype() {
    return sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
  }

  Stack<T> stack_;
  const T *x_;
  int64_t step_x_, height_;
  Shape shape_;
  int64_t k_, n_;
  Tensor rows_, products_, matrix_;
};

} // namespace sparse_bridge
