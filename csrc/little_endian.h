// Numbers of fixed width, little endian and unpadded, as bytes.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

namespace tsr {

static_assert(std::endian::native == std::endian::little, "the wire is little endian");

template <typename T>
void Append(T value, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Reads numbers from bytes that the caller has proved to be there.
class Reader {
 public:
  explicit Reader(const uint8_t* at) : at_(at) {}

  template <typename T>
  T Read() {
    T value;
    std::memcpy(&value, at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }

 private:
  const uint8_t* at_;
};

}  // namespace tsr
