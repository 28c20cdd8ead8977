// Zeroed memory that costs nothing until it is touched, in huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include <sys/mman.h>

namespace ns {

constexpr size_t kHugePage = size_t{1} << 21;

constexpr size_t align_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The system gave no memory, and which was wanted.
class NoMemory : public std::bad_alloc {
 public:
  NoMemory(size_t bytes, const char* purpose)
      : words_("the system has no " + std::to_string(bytes) + " bytes left for " + purpose) {}
  const char* what() const noexcept override { return words_.c_str(); }

 private:
  std::string words_;
};

// One anonymous mapping, aligned to a huge page. Throws NoMemory.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes, const char* purpose = "this") : size_(bytes) {
    if (bytes == 0) return;
    mapped_bytes_ = align_up(bytes, kHugePage) + kHugePage;
    void* mapped = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | kNoReserve, -1, 0);
    if (mapped == MAP_FAILED) throw NoMemory(bytes, purpose);
    mapped_ = mapped;
    data_ = reinterpret_cast<uint8_t*>(align_up(reinterpret_cast<uintptr_t>(mapped), kHugePage));
#if defined(MADV_HUGEPAGE)
    if (bytes >= kHugePage) madvise(data_, align_up(bytes, kHugePage), MADV_HUGEPAGE);
#endif
  }
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory() {
    if (mapped_) munmap(mapped_, mapped_bytes_);
  }

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
#if defined(MAP_NORESERVE)
  static constexpr int kNoReserve = MAP_NORESERVE;
#else
  static constexpr int kNoReserve = 0;
#endif

  void swap(Memory& other) {
    std::swap(mapped_, other.mapped_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Hands out consecutive pieces, 64-byte aligned; over no memory (nullptr) it only counts them.
// Throws std::bad_alloc for more than can be counted.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<uint8_t*>(base)) {}

  template <class T>
  T* take(size_t count) {
    if (count > (SIZE_MAX / 2 - used_) / sizeof(T)) throw std::bad_alloc();
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += align_up(count * sizeof(T), 64);
    return piece;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

}  // namespace ns
