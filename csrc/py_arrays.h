// NumPy arrays as arguments.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <span>

namespace tsr {

// C-contiguous; one of another dtype is converted where no value can be lost, else refused.
template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

// The elements of `array`, for as long as it lives.
template <typename T>
std::span<const T> SpanOf(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

}  // namespace tsr
