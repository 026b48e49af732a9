// Calls of torch's own operators, by name, and views of memory.

#pragma once

#include "products.h"

#include <array>

namespace sparse_bridge {

inline const torch::stable::Device kCpu(torch::headeronly::DeviceType::CPU);

// The only result of an operator of torch. None with a `Scalar`: the ABI has no form for those.
template <class... Arguments>
Tensor call(const char *name, const char *overload, const Arguments &...arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor zeros(Numbers sizes, ScalarType dtype) {
  return torch::stable::full(sizes, 0.0, dtype, std::nullopt, kCpu);
}

inline Tensor in_dtype(const Tensor &x, ScalarType dtype) {
  return x.scalar_type() == dtype ? x : torch::stable::to(x, dtype);
}

inline std::optional<Tensor> in_dtype(const std::optional<Tensor> &x, ScalarType dtype) {
  return x ? std::optional<Tensor>(in_dtype(*x, dtype)) : x;
}

template <class T> T *values_of(const Tensor &x) { return static_cast<T *>(x.mutable_data_ptr()); }

// A matrix in memory of somebody else.
template <class T>
Tensor matrix_at(T *data, int64_t rows, int64_t columns, int64_t row_step, int64_t column_step) {
  constexpr auto dtype = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
  const int64_t sizes[] = {rows, columns}, steps[] = {row_step, column_step};
  void *place = const_cast<std::remove_const_t<T> *>(data);
  return torch::stable::from_blob(place, {sizes, 2}, {steps, 2}, kCpu, dtype);
}

// Sums of half precision run in fp32, of fp64 in fp64.
inline ScalarType accumulator(const Tensor &x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

} // namespace sparse_bridge
