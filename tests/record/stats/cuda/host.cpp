// kernels.cu on the host: each block's threads are fibers, which take turns at barriers and exchanges within a warp.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint4 {
    unsigned x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx;

namespace machine {
struct Barrier {
    unsigned arrived = 0, generation = 0;
};
ucontext_t scheduler, fibers[THREADS];
std::vector<char> stacks(THREADS * 65536);
bool over[THREADS];
Barrier block, warps[THREADS / 32];
uint64_t exchanged[THREADS];

void let_others_run()
{
    const unsigned self = threadIdx.x;
    swapcontext(&fibers[self], &scheduler);
    threadIdx.x = self;
}

void wait(Barrier& barrier, unsigned all)
{
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == all) {
        barrier.arrived = 0;
        barrier.generation++;
    }
    while (barrier.generation == generation)
        let_others_run();
}

void wait_for_warp() { wait(warps[threadIdx.x / 32], 32); }
}  // namespace machine

static void __syncthreads() { machine::wait(machine::block, THREADS); }
static void __threadfence() {}

template <class T> static T __shfl_xor_sync(unsigned, T value, int distance)
{
    std::memcpy(&machine::exchanged[threadIdx.x], &value, sizeof value);
    machine::wait_for_warp();
    std::memcpy(&value, &machine::exchanged[threadIdx.x ^ distance], sizeof value);
    machine::wait_for_warp();
    return value;
}

static bool __any_sync(unsigned, bool value)
{
    machine::exchanged[threadIdx.x] = value;
    machine::wait_for_warp();
    bool any = false;
    for (unsigned lane = 0; lane < 32; lane++)
        any |= machine::exchanged[threadIdx.x / 32 * 32 + lane] != 0;
    machine::wait_for_warp();
    return any;
}

template <class T> static T __ldg(const T* address)
{
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
}
template <class T, class V> static T atomicAdd(T* at, V value)
{
    const T before = *at;
    *at += value;
    return before;
}
template <class T> static void atomicMax(T* at, T value) { *at = *at < value ? value : *at; }

template <class To, class From> static To same_bits(From value)
{
    static_assert(sizeof(To) == sizeof(From), "");
    To other;
    std::memcpy(&other, &value, sizeof other);
    return other;
}
static float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
static unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
static double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
static long long __double_as_longlong(double value) { return same_bits<long long>(value); }
static int __clz(int bits) { return __builtin_clz((unsigned)bits); }
static int __clzll(long long bits) { return __builtin_clzll((unsigned long long)bits); }
static double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static float half_to_float(unsigned bits) { return (float)same_bits<_Float16>((uint16_t)bits); }

typedef char* SharedAddress;
static SharedAddress shared_address(unsigned* word) { return (char*)word; }
static void shared_add(SharedAddress address, unsigned number) { *(unsigned*)address += number; }
template <class T> static void opaque(T&) {}

using std::sqrt;

#include "kernels.cu"
#include "blocks.cu"

typedef void (*Kernel)(const Stretch*, double*);
static Kernel kernel;
static const Stretch* table;
static double* results;

static void body()
{
    kernel(table, results);
    machine::over[threadIdx.x] = true;
    machine::let_others_run();
}

extern "C" void launch(Kernel function, unsigned blocks, const Stretch* rows, double* into)
{
    kernel = function, table = rows, results = into;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (unsigned t = 0; t < THREADS; t++) {
            getcontext(&machine::fibers[t]);
            machine::fibers[t].uc_stack.ss_sp = &machine::stacks[t * 65536];
            machine::fibers[t].uc_stack.ss_size = 65536;
            machine::fibers[t].uc_link = &machine::scheduler;
            makecontext(&machine::fibers[t], body, 0);
            machine::over[t] = false;
        }
        for (bool any = true; any;) {
            any = false;
            for (unsigned t = 0; t < THREADS; t++)
                if (!machine::over[t]) {
                    any = true;
                    threadIdx.x = t;
                    swapcontext(&machine::scheduler, &machine::fibers[t]);
                }
        }
    }
}
