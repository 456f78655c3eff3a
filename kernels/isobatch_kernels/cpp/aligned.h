// Large zeroed buffers: page aligned, huge pages asked for, memory taken when first touched.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#if defined(__linux__) || defined(__APPLE__)
#include <sys/mman.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace isobatch {

// An address sanitizer does not know mappings. Told of their ends, it sees kernels that run past them; buffers are then
// exactly as large as asked for.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kGuarded = true;
inline void forbid(const void* from, size_t bytes) { ASAN_POISON_MEMORY_REGION(from, bytes); }
inline void allow(const void* from, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(from, bytes); }
#else
constexpr bool kGuarded = false;
inline void forbid(const void*, size_t) {}
inline void allow(const void*, size_t) {}
#endif

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes) { reset(bytes); }
  AlignedBuffer(AlignedBuffer&& other) noexcept { swap(other); }
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~AlignedBuffer() { release(); }

  // Drops the content; the new one is zero.
  void reset(size_t bytes) {
    release();
    if (bytes == 0) return;
    constexpr size_t kHugePage = (size_t)2 << 20;
    // A large buffer starts on a huge page, so that the system can map it with few entries.
    const size_t alignment = bytes >= 4 * kHugePage ? kHugePage : 4096;
    mapped_ = (bytes + kSlack + 4095) / 4096 * 4096 + (alignment > 4096 ? alignment : 0);
    void* raw = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) {
      mapped_ = 0;
      throw std::bad_alloc();
    }
    raw_ = raw;
    data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + alignment - 1) / alignment * alignment);
    bytes_ = bytes;
    forbid(data_ + bytes, static_cast<uint8_t*>(raw) + mapped_ - (data_ + bytes));
#if defined(__linux__)
    if (alignment == kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  // Grows to at least `bytes`; the content is lost when it grows.
  void ensure(size_t bytes) {
    if (bytes > bytes_) reset(kGuarded ? bytes : bytes + bytes / 4);
  }

  size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const { return reinterpret_cast<T*>(data_); }

 private:
  // Kernels may prefetch past the end, and read whole vectors of which only some lanes count.
  static constexpr size_t kSlack = 4096;

  void release() {
    if (raw_) {
      allow(raw_, mapped_);
      munmap(raw_, mapped_);
    }
    raw_ = nullptr;
    data_ = nullptr;
    bytes_ = mapped_ = 0;
  }
  void swap(AlignedBuffer& other) {
    std::swap(raw_, other.raw_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
  }
  void* raw_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0, mapped_ = 0;
};

// Memory for many long-lived pieces, packed into few large buffers so that even small ones lie on huge pages. Freed together.
class Arena {
 public:
  // Zeroed, 64-byte aligned.
  uint8_t* take(size_t bytes) {
    constexpr size_t kChunk = kGuarded ? 0 : (size_t)32 << 20;
    const size_t size = (bytes + 63) / 64 * 64;
    if (chunks_.empty() || used_ + size > chunks_.back().bytes()) {
      chunks_.emplace_back(size > kChunk ? size : kChunk);
      used_ = 0;
    }
    uint8_t* piece = chunks_.back().as<uint8_t>() + used_;
    used_ += size;
    return piece;
  }

 private:
  std::vector<AlignedBuffer> chunks_;
  size_t used_ = 0;  // of the last chunk
};

}  // namespace isobatch
