#include "products.h"

#include "errors.h"
#include "gemm.h"

#include <algorithm>

namespace sparse_bridge {

namespace {

// w[v, i, o] of group g at v * step_v + i * step_i + (g * n + o) * step_o.
struct Layout {
  int64_t n_offsets, k, n, step_v, step_i, step_o;

  static Layout of(const Tensor &weight, const Form &form) {
    if (form.layout != "ovi" && form.layout != "vio")
      fail("ShapeError", "weight layout ", form.layout, "; expected vio or ovi.");
    const bool ovi = form.layout == "ovi";
    const int64_t last = weight.dim() - 1;
    if (last < 1 || (!ovi && last > 2))
      fail("ShapeError", "a weight of ", weight.dim(), " dimensions.");
    Layout found{1, 0, 0, 0, 0, 0};
    if (ovi) {
      found.n = weight.size(0), found.k = weight.size(last);
      for (int64_t d = 1; d < last; ++d) found.n_offsets *= weight.size(d);
      found.step_o = weight.stride(0), found.step_i = weight.stride(last);
      found.step_v = found.k; // of contiguous weights
    } else {
      found.n_offsets = last == 2 ? weight.size(0) : 1;
      found.k = weight.size(last - 1), found.n = weight.size(last);
      found.step_v = last == 2 ? weight.stride(0) : 0;
      found.step_i = weight.stride(last - 1), found.step_o = weight.stride(last);
    }
    if (form.groups < 1 || found.n % form.groups)
      fail("ShapeError", found.n, " output channels do not divide into ", form.groups, " groups.");
    found.n /= form.groups;
    return found;
  }
};

// Rows of the input before equal ones are one.
int64_t rows_in(const KernelMap &map) {
  return map.fold ? int64_t(map.fold->place.size()) : map.n_in;
}

void check(const Tensor &x, const Tensor &weight, const KernelMap &map, const Form &form,
           const Layout &w, const Epilogue &end) {
  if (x.dim() != 2) fail("ShapeError", "features have ", x.dim(), " dimensions; expected [N, C].");
  const int64_t read = form.transposed ? map.n_out : rows_in(map);
  if (x.size(0) != read)
    fail("ShapeError", "features have ", x.size(0), " rows, but the kernel map was built for ",
         read, "; features and coordinates must be row-aligned.");
  if (x.size(1) != w.k * form.groups)
    fail("ShapeError", "features have ", x.size(1), " channels, the weight expects ",
         w.k * form.groups, ".");
  const int64_t written = form.transposed ? rows_in(map) : map.n_out;
  if (end.residual && (end.residual->dim() != 2 || end.residual->size(0) != written ||
                       end.residual->size(1) != w.n * form.groups))
    fail("ShapeError", "the residual has another shape than the result, [", written, ", ",
         w.n * form.groups, "].");
  for (const auto *vector : {&end.bias, &end.mean, &end.var, &end.gain, &end.beta})
    if (*vector && (*vector)->numel() != w.n * form.groups)
      fail("ShapeError", "a bias or norm has ", (*vector)->numel(), " values; expected ",
           w.n * form.groups, ".");
  if (w.n_offsets != int64_t(map.pairs.size()))
    fail("ShapeError", "the weight has ", w.n_offsets, " matrices, the kernel map ",
         map.pairs.size(), " offsets.");
  if (x.scalar_type() != weight.scalar_type())
    fail("DataTypeError", "features and weight have different dtypes; convert one.");
}

// Adds the products of one offset to their rows of y. row_in, row_out: of each of `n_pairs` pairs.
template <class T, class In, class Out>
void add_offset(Multiplier<T> &multiplier, int64_t n_pairs, const In &row_in, const Out &row_out,
                bool apart, T *y, int64_t step_y, int64_t n) {
  for (int64_t first = 0; first < n_pairs; first += kBlock) {
    const int64_t count = std::min(kBlock, n_pairs - first), width = multiplier.width();
    const T *made = multiplier.products(count, [&](int64_t i) { return row_in(first + i); });
    auto add = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T *to = y + int64_t(row_out(first + i)) * step_y;
        const T *from = made + i * width;
        for (int64_t c = 0; c < n; ++c) to[c] += from[c];
      }
    };
    if (apart)
      torch::stable::parallel_for(0, count, Multiplier<T>::grain(n), add);
    else
      add(0, count);
  }
}

// In which order the products of a row add up: those of fp32 as they come, the row's own last; of
// fp64 the row's own first. As in Python (`core/conv/dataflows/per_offset.py`), which reads a map
// among the same rows backwards from its last offset on.
Numbers turns(const KernelMap &map, bool own_first, bool backwards) {
  const int64_t n_offsets = int64_t(map.pairs.size());
  const bool from_last = backwards && map.whole >= 0 && map.inputs_distinct;
  Numbers order;
  if (map.whole >= 0 && own_first) order.push_back(map.whole);
  for (int64_t i = 0; i < n_offsets; ++i) {
    const int64_t v = from_last ? n_offsets - 1 - i : i;
    if (v != map.whole) order.push_back(v);
  }
  if (map.whole >= 0 && !own_first) order.push_back(map.whole);
  return order;
}

int64_t longest(const KernelMap &map) {
  int64_t most = map.whole >= 0 ? map.n_out : 0;
  for (const Pairs &one : map.pairs) most = std::max(most, int64_t(one.in.size()));
  return most;
}

template <class T>
void sum_products(const Tensor &x, const Tensor &weight, const KernelMap &map, const Form &form,
                  const Layout &w, const Tensor &y) {
  const T *values = static_cast<const T *>(x.const_data_ptr());
  const T *matrices = static_cast<const T *>(weight.const_data_ptr());
  T *sums = static_cast<T *>(y.mutable_data_ptr());
  const int64_t step_x = w.k * form.groups, step_y = w.n * form.groups;
  const bool apart = !form.transposed || map.inputs_distinct;
  for (int64_t group = 0; group < form.groups; ++group) {
    const T *own = matrices + group * w.n * w.step_o;
    Multiplier<T> multiplier({own, w.step_v, w.step_i, w.step_o, w.k, w.n}, values + group * w.k,
                             step_x, longest(map));
    T *result = sums + group * w.n;
    for (int64_t v : turns(map, sizeof(T) == 8, form.transposed)) {
      const Rows &in = form.transposed ? map.pairs[v].out : map.pairs[v].in;
      const Rows &out = form.transposed ? map.pairs[v].in : map.pairs[v].out;
      auto itself = [](int64_t i) { return i; };
      auto row_in = [&](int64_t i) { return int64_t(in[i]); };
      auto row_out = [&](int64_t i) { return int64_t(out[i]); };
      const int64_t n_pairs = v == map.whole ? map.n_out : int64_t(in.size());
      if (n_pairs) multiplier.turn_to(v);
      if (v == map.whole)
        add_offset(multiplier, n_pairs, itself, itself, true, result, step_y, w.n);
      else
        add_offset(multiplier, n_pairs, row_in, row_out, apart, result, step_y, w.n);
    }
  }
}

// The products of distinct rows, in the dtype of sums.
Tensor products_of(const Tensor &x, const Tensor &weight, const KernelMap &map, const Form &form,
                   const Layout &w) {
  const ScalarType dtype = accumulator(x);
  const int64_t n_out = form.transposed ? map.n_in : map.n_out;
  Tensor y = zeros({n_out, w.n * form.groups}, dtype);
  if (n_out == 0 || x.size(0) == 0) return y;
  const Tensor rows = in_dtype(torch::stable::contiguous(x), dtype);
  const Tensor matrices = in_dtype(weight, dtype);
  if (dtype == ScalarType::Double)
    sum_products<double>(rows, matrices, map, form, w, y);
  else
    sum_products<float>(rows, matrices, map, form, w, y);
  return y;
}

// ---- equal coordinates ----------------------------------------------------------------------------

// Every row takes its distinct coordinate's; rows outside of the grid zeros.
Tensor copy_rows(const Tensor &y, const Fold &fold) {
  const Tensor from = torch::stable::contiguous(y);
  const int64_t n_rows = int64_t(fold.place.size());
  const int64_t size = y.size(1) * int64_t(y.element_size());
  Tensor to = zeros({n_rows, y.size(1)}, y.scalar_type());
  const char *source = static_cast<const char *>(from.const_data_ptr());
  char *target = static_cast<char *>(to.mutable_data_ptr());
  for (int64_t row = 0; row < n_rows; ++row) {
    if (fold.place[row] < 0) continue;
    const char *place = source + fold.place[row] * size;
    std::copy(place, place + size, target + row * size);
  }
  return to;
}

// ---- what follows the sum -------------------------------------------------------------------------

bool is_half(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

Tensor normed(const Tensor &y, const Epilogue &end) {
  const ScalarType dtype = y.scalar_type();
  bool alike = true, in_float = true;
  for (const auto *vector : {&end.mean, &end.var, &end.gain, &end.beta})
    if (*vector) {
      alike = alike && (*vector)->scalar_type() == dtype;
      in_float = in_float && (*vector)->scalar_type() == ScalarType::Float;
    }
  const bool taken = alike || (in_float && is_half(dtype)); // by torch's norm, as they are
  const ScalarType wide = is_half(dtype) ? ScalarType::Float : dtype;
  auto vector = [&](const std::optional<Tensor> &one) { return taken ? one : in_dtype(one, wide); };
  return call("aten::batch_norm", "", y, vector(end.gain), vector(end.beta), vector(end.mean),
              vector(end.var), false, 0.0, end.eps, true);
}

// x's values after `change`, in the dtype of sums and then rounded: where halves are computed, this
// is what torch does.
template <class Change> Tensor changed(const Tensor &x, const Change &change) {
  const Tensor y = in_dtype(x, accumulator(x));
  const int64_t n = y.size(1);
  auto every = [&](auto *values) {
    torch::stable::parallel_for(0, y.size(0), 16384 / n + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t c = 0; c < n; ++c) values[row * n + c] = change(values[row * n + c], row, c);
    });
  };
  if (y.scalar_type() == ScalarType::Double)
    every(values_of<double>(y));
  else
    every(values_of<float>(y));
  return in_dtype(y, x.scalar_type());
}

// y plus a bias [C] or the rows of a residual [N, C].
Tensor plus(const Tensor &y, const Tensor &given, bool by_row) {
  const ScalarType dtype = accumulator(y);
  const Tensor more = torch::stable::contiguous(in_dtype(in_dtype(given, y.scalar_type()), dtype));
  const int64_t n = y.size(1), step = by_row ? n : 0;
  const bool wide = dtype == ScalarType::Double;
  const double *wides = wide ? values_of<double>(more) : nullptr;
  const float *floats = wide ? nullptr : values_of<float>(more);
  return changed(y, [=](auto value, int64_t row, int64_t c) {
    if constexpr (sizeof(value) == 8)
      return value + wides[row * step + c];
    else
      return value + floats[row * step + c];
  });
}

// A branch for each row of `core/conv/activations.py`.
Tensor activated(const Tensor &y, const std::string &name, double alpha) {
  if (name == "relu" || name == "sigmoid") return call(("aten::" + name).c_str(), "", y);
  if (name == "leaky_relu")
    return changed(y, [=](auto value, int64_t, int64_t) {
      return value > 0 ? value : value * decltype(value)(alpha);
    });
  fail("UnsupportedError", "activation ", name, "; expected relu, leaky_relu or sigmoid.");
}

// Rounded to `dtype` wherever separate operations would round.
Tensor finish(Tensor y, const Epilogue &end, ScalarType dtype) {
  if (end.bias) y = plus(y, *end.bias, false);
  y = in_dtype(y, dtype);
  if (end.mean) y = normed(y, end);
  if (end.residual) y = plus(y, *end.residual, true);
  return end.activation ? activated(y, *end.activation, end.alpha) : y;
}

} // namespace

Tensor convolve(const Tensor &x, const Tensor &given, const KernelMap &map, const Form &form,
                const Epilogue &end) {
  const Tensor weight = torch::stable::contiguous(given);
  const Layout w = Layout::of(weight, form);
  check(x, weight, map, form, w, end);
  const ScalarType dtype = x.scalar_type();
  if (!map.fold) return finish(products_of(x, weight, map, form, w), end, dtype);
  if (form.transposed) {
    Tensor y = in_dtype(products_of(x, weight, map, form, w), dtype);
    return finish(copy_rows(y, *map.fold), end, dtype);
  }
  const Tensor sums = sum_rows(x, *map.fold);
  return finish(in_dtype(products_of(sums, weight, map, form, w), dtype), end, dtype);
}

} // namespace sparse_bridge
