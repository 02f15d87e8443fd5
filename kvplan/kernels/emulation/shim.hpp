// What a CUDA source finds when a C++17 compiler builds it for the CPU (g++ or clang++): CUDA's names, and the twins of
// the few functions that the source keeps for itself on a GPU. runtime.cpp runs the result, one fiber a CUDA thread.
//
// Included before the source. A line after it registers each kernel, which is a function of one struct by value:
// KV_EMULATION_KERNEL(name).

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KV_EMULATED

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define KV_SHARED(type, name) type* name = reinterpret_cast<type*>(kv_emulation::shared_memory)

struct uint2 { unsigned x, y; } __attribute__((aligned(8)));
struct uint3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16)));
struct int2 { int x, y; } __attribute__((aligned(8)));
struct int4 { int x, y, z, w; } __attribute__((aligned(16)));
struct float2 { float x, y; } __attribute__((aligned(8)));
struct float4 { float x, y, z, w; } __attribute__((aligned(16)));
struct dim3 { unsigned x, y, z; };

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace kv_emulation {

// The line that called: default arguments are evaluated where a function is called.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

struct Place {  // of the thread that runs now
  uint3 thread;
};

enum class Collective : int { kSyncwarp, kShuffle, kShuffleXor, kShuffleUp, kShuffleDown, kBallot, kAny, kAll, kMma };

using Run = void (*)(const void* function, const void* arguments);

struct Kernel {
  const char* name;
  const void* function;
  size_t argument_bytes;
  Run run;
  Kernel* next;
  Kernel(const char* name, const void* function, size_t argument_bytes, Run run);
};

extern Place* current;
extern uint3 block_index, block_shape, grid_shape;
extern unsigned char* shared_memory;

// All of these give control to other threads and come back, or end the launch with a message.
// At one of a block's barriers, 0 to 15, for so many of its threads; 0 threads are all.
void wait_at_barrier(int number, unsigned num_threads, Site site);
uint64_t warp_collective(Collective kind, unsigned mask, uint64_t value, int lane, int width, Site site);
void warp_mma(float* d, const unsigned* a, const unsigned* b, bool bf16, Site site);

// Checks bounds and alignment of an access to global memory, and logs it if that is asked for.
void touch(const void* address, size_t bytes, bool store, Site site);

template <class T>
T shuffle(Collective kind, unsigned mask, T value, int lane, int width, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = warp_collective(kind, mask, bits, lane, width, site);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class Arguments>
void run(const void* function, const void* arguments) {
  Arguments copy;
  memcpy(&copy, arguments, sizeof(Arguments));
  reinterpret_cast<void (*)(Arguments)>(const_cast<void*>(function))(copy);
}

template <class Arguments>
Kernel kernel(const char* name, void (*function)(Arguments)) {
  return Kernel(name, reinterpret_cast<const void*>(function), sizeof(Arguments), run<Arguments>);
}

}  // namespace kv_emulation

#define KV_EMULATION_KERNEL(name) static kv_emulation::Kernel kv_emulation_##name = kv_emulation::kernel(#name, name);

#define threadIdx (kv_emulation::current->thread)
#define blockIdx (kv_emulation::block_index)
#define blockDim (kv_emulation::block_shape)
#define gridDim (kv_emulation::grid_shape)
#define warpSize 32

inline void __syncthreads(kv_emulation::Site site = kv_emulation::Site::here()) {
  kv_emulation::wait_at_barrier(0, 0, site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, kv_emulation::Site site = kv_emulation::Site::here()) {
  kv_emulation::warp_collective(kv_emulation::Collective::kSyncwarp, mask, 0, 0, 32, site);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, kv_emulation::Site site = kv_emulation::Site::here()) {
  return kv_emulation::shuffle(kv_emulation::Collective::kShuffle, mask, value, lane, width, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane, int width = 32, kv_emulation::Site site = kv_emulation::Site::here()) {
  return kv_emulation::shuffle(kv_emulation::Collective::kShuffleXor, mask, value, lane, width, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, kv_emulation::Site site = kv_emulation::Site::here()) {
  return kv_emulation::shuffle(kv_emulation::Collective::kShuffleUp, mask, value, static_cast<int>(by), width, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, kv_emulation::Site site = kv_emulation::Site::here()) {
  return kv_emulation::shuffle(kv_emulation::Collective::kShuffleDown, mask, value, static_cast<int>(by), width, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, kv_emulation::Site site = kv_emulation::Site::here()) {
  return static_cast<unsigned>(kv_emulation::warp_collective(kv_emulation::Collective::kBallot, mask, predicate != 0, 0, 32, site));
}
inline int __any_sync(unsigned mask, int predicate, kv_emulation::Site site = kv_emulation::Site::here()) {
  return static_cast<int>(kv_emulation::warp_collective(kv_emulation::Collective::kAny, mask, predicate != 0, 0, 32, site));
}
inline int __all_sync(unsigned mask, int predicate, kv_emulation::Site site = kv_emulation::Site::here()) {
  return static_cast<int>(kv_emulation::warp_collective(kv_emulation::Collective::kAll, mask, predicate != 0, 0, 32, site));
}

inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
inline int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
inline float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }

// PTX prmt, default mode: each nibble of the selector takes one of eight bytes, or its sign eight times over.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = (static_cast<uint64_t>(high) << 32) | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = (selector >> (4 * i)) & 0xf;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7))) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline float __expf(float value) { return expf(value); }
template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }

// The twins of the source's own functions.

inline float fast_exp2(float value) { return exp2f(value); }
inline float fast_reciprocal(float value) { return 1.0f / value; }

inline uint4 ldg128(const void* address, kv_emulation::Site site = kv_emulation::Site::here()) {
  kv_emulation::touch(address, 16, false, site);
  return *static_cast<const uint4*>(address);
}
template <class T> T ldg(const T* address, kv_emulation::Site site = kv_emulation::Site::here()) {
  kv_emulation::touch(address, sizeof(T), false, site);
  return *address;
}
inline void stg128(void* address, uint4 value, kv_emulation::Site site = kv_emulation::Site::here()) {
  kv_emulation::touch(address, 16, true, site);
  *static_cast<uint4*>(address) = value;
}
template <class T> void stg(T* address, T value, kv_emulation::Site site = kv_emulation::Site::here()) {
  kv_emulation::touch(address, sizeof(T), true, site);
  *address = value;
}

inline void sync_warps(int barrier, int threads, kv_emulation::Site site = kv_emulation::Site::here()) {
  kv_emulation::wait_at_barrier(barrier, static_cast<unsigned>(threads), site);
}

inline void mma_m16n8k16_bf16(float d[4], const unsigned a[4], const unsigned b[2], kv_emulation::Site site = kv_emulation::Site::here()) {
  kv_emulation::warp_mma(d, a, b, true, site);
}
inline void mma_m16n8k16_f16(float d[4], const unsigned a[4], const unsigned b[2], kv_emulation::Site site = kv_emulation::Site::here()) {
  kv_emulation::warp_mma(d, a, b, false, site);
}
