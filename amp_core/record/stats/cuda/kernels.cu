// The statistics on CUDA, compiled by NVRTC without any header: `measure`, `capped`, `channels`, `norms` and `largest`.
//
// A block takes one row of a table: a stretch of one tensor. It reads each value once, in loads of 16 bytes, and at its
// end adds its findings to the results, which begin as zeros, with relaxed atomics.
//
// Exponents are counted in shared memory, in as many copies as fit, so that threads of a warp whose values have the same
// exponent use different words. A bin counts one exponent field: zeros and subnormals share the first one, infinities and
// NaNs the last. What its field does not tell is rare: it is looked at apart, in the loads that hold any. Sums are of
// doubles, as the specification asks (see measure.py).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef THREADS
#define THREADS 512
#endif
#define WARPS (THREADS / 32)
#define WORDS 8192  // of shared memory for counts: 32 KiB
#define LEADING 7   // values of a packed vector before its counts: zero, inf, nan, absmax, absmin, abs_sum, sq_sum

struct Stretch {      // a row of the table
    u64 address;      // of its first value; of `channels`, see there
    u64 length;       // its values
    u64 out;          // index of the packed vector, or of the norm, in the results
    u64 ticket;       // index of a zero in the results that counts the tensor's finished stretches
    u64 stretches;    // of the tensor
    u64 caps;         // address of the largest magnitudes by channel, as float or double
    u64 channels;     // how many there are
    u64 inner;        // values in a row that share one
    u64 first;        // values of the tensor before the stretch
    u64 capped_out;   // index of the packed vector of the capped values
    u64 format;       // of its values, for `channels` and `largest`, which take several: 0 is FP32, 1 FP16, 2 BF16
};

template <class T> static __device__ __forceinline__ T smaller(T a, T b) { return a < b ? a : b; }
template <class T> static __device__ __forceinline__ T larger(T a, T b) { return a > b ? a : b; }

#ifdef __CUDACC__  // what takes instructions of the device; the tests have the same for the host
static __device__ __forceinline__ float half_to_float(u32 bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}

typedef u32 SharedAddress;

static __device__ __forceinline__ SharedAddress shared_address(u32* word)
{
    u64 address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(word));
    return (u32)address;
}

static __device__ __forceinline__ void shared_add(SharedAddress address, u32 number)
{
    asm volatile("red.shared.add.u32 [%0], %1;" : : "r"(address), "r"(number));
}

// From here on the compiler knows nothing of how the value came about, and so does not compute it again.
static __device__ __forceinline__ void opaque(u32& value) { asm volatile("" : "+r"(value)); }
#endif

// Formats. `magnitude` returns the bits of |x| as float, or as double where x is that: nothing is rounded. `part` is the
// place of the value in a word of 32 bits. LOWEST is the exponent of the smallest subnormal.

struct Single {
    typedef u32 Bits;
    enum { MANTISSA = 23, FIELDS = 256, BIAS = 127 };
    static __device__ __forceinline__ double real(u32 bits) { return (double)__uint_as_float(bits); }
    static __device__ __forceinline__ int highest_bit(u32 bits) { return 31 - __clz((int)bits); }
};

struct Fp32 : Single {
    typedef u32 Raw;
    enum { LOWEST = -149, SUBNORMALS = 1 };
    static __device__ __forceinline__ u32 magnitude(u32 word, int) { return word & 0x7fffffffu; }
};

struct Bf16 : Single {
    typedef u16 Raw;
    enum { LOWEST = -133, SUBNORMALS = 1 };
    static __device__ __forceinline__ u32 magnitude(u32 word, int part)
    {
        return (part ? word : word << 16) & 0x7fff0000u;
    }
};

struct Fp16 : Single {
    typedef u16 Raw;
    enum { LOWEST = -24, SUBNORMALS = 0 };  // as float they are normal
    static __device__ __forceinline__ u32 magnitude(u32 word, int part)
    {
        return __float_as_uint(half_to_float((word & 0x7fff7fffu) >> 16 * part & 0xffff));
    }
};

struct E5m2 : Single {
    typedef u8 Raw;
    enum { LOWEST = -16, SUBNORMALS = 0 };
    static __device__ __forceinline__ u32 magnitude(u32 word, int part)
    {
        return __float_as_uint(half_to_float((word >> 8 * part & 0x7f) << 8));
    }
};

struct E4m3 : Single {
    typedef u8 Raw;
    enum { LOWEST = -9, SUBNORMALS = 0 };
    static __device__ __forceinline__ u32 magnitude(u32 word, int part)
    {
        const u32 bits = word >> 8 * part & 0x7f;
        const float value = half_to_float(bits << 7) * 256.0f;  // the bias of FP16 is larger by 8
        return bits == 0x7f ? 0x7fc00000u : __float_as_uint(value);
    }
};

struct Fp64 {
    typedef u64 Bits;
    typedef u64 Raw;
    enum { MANTISSA = 52, FIELDS = 2048, BIAS = 1023, LOWEST = -1074, SUBNORMALS = 1 };
    static __device__ __forceinline__ double real(u64 bits) { return __longlong_as_double((long long)bits); }
    static __device__ __forceinline__ u64 magnitude(u64 bits, int) { return bits & 0x7fffffffffffffffull; }
    static __device__ __forceinline__ int highest_bit(u64 bits) { return 63 - __clzll((long long)bits); }
};

template <class F> static __device__ __forceinline__ typename F::Bits magnitude(typename F::Raw raw)
{
    return F::magnitude(raw, 0);
}

// How many values a load has, and how many of them are looked at together: what decides on the registers that are used.
template <class F> struct Size {
    enum { LOAD = 16 / sizeof(typename F::Raw), PART = LOAD < 4 ? LOAD : 4 };
};

// The values of a load from number `from` on.
template <class F, int PART>
static __device__ __forceinline__ void unpack(const uint4& raw, int from, typename F::Bits (&bits)[PART])
{
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    enum { PER_WORD = sizeof(typename F::Raw) == 8 ? 1 : 4 / sizeof(typename F::Raw) };
#pragma unroll
    for (int i = 0; i < PART; i++) {
        if (sizeof(typename F::Raw) == 8) {
            bits[i] = magnitude<F>((u64)words[(2 * i + 1) % 4] << 32 | words[2 * i % 4]);
        } else {
            bits[i] = F::magnitude(words[(from + i) / PER_WORD], (from + i) % PER_WORD);
            opaque(*(u32*)&bits[i]);
        }
    }
}

// One of HISTOGRAMS histograms of a block.
template <class F, int HISTOGRAMS> struct Histogram {
    typedef typename F::Bits Bits;
    enum { COPIES = WORDS / F::FIELDS / HISTOGRAMS };
    u32* counts;
    u32* subnormals;      // by exponent
    SharedAddress first;  // of this thread's copy

    __device__ __forceinline__ Histogram(u32* words, u32* low, int number)
        : counts(words + number * (WORDS / HISTOGRAMS)), subnormals(low + 64 * number)
    {
        first = shared_address(counts + threadIdx.x % COPIES);
        opaque(first);
    }

    __device__ __forceinline__ void add(Bits bits, u32 times)
    {
        u32 field = (u32)(bits >> F::MANTISSA);
        opaque(field);
        shared_add(first + field * (4 * COPIES), times);
    }

    __device__ __forceinline__ void add_subnormal(Bits bits)
    {
        if (bits != 0 && bits >> F::MANTISSA == 0)
            atomicAdd(subnormals + F::highest_bit(bits), 1u);
    }

    // Add the counts of all exponents to a packed vector. `first` and `last` become the counts of those bins, as far as
    // this thread has them.
    __device__ __forceinline__ void flush(double* packed, u32& first, u32& last)
    {
        first = last = 0;
        for (int i = threadIdx.x; i < F::FIELDS * COPIES; i += THREADS) {
            u32 count = counts[i];
            if (!__any_sync(0xffffffffu, count != 0))
                continue;
#pragma unroll
            for (int d = 1; d < COPIES; d *= 2)
                count += __shfl_xor_sync(0xffffffffu, count, d);
            const int field = i / COPIES;
            if (i % COPIES || count == 0)
                continue;
            if (field == 0)
                first = count;
            else if (field == F::FIELDS - 1)
                last = count;
            else
                atomicAdd(packed + (LEADING + field - F::BIAS - F::LOWEST), (double)count);
        }
        if (F::SUBNORMALS && threadIdx.x < F::MANTISSA && subnormals[threadIdx.x]) {
            const int exponent = 1 - F::BIAS - F::MANTISSA + (int)threadIdx.x;
            atomicAdd(packed + (LEADING + exponent - F::LOWEST), (double)subnormals[threadIdx.x]);
            first -= subnormals[threadIdx.x];
        }
    }
};

// The cap of each value of a load, for loads that follow one another at a distance of THREADS.
template <class F> struct Caps {
    typedef typename F::Bits Bits;
    enum { SIZE = Size<F>::LOAD };
    const Bits* caps;
    u32 channels, inner;
    u32 channel, within;  // of the first value of the load
    u32 channels_on, within_on;
    enum { SHARED, ADJACENT, ANY } kind;  // the values of a load share a cap, or their caps lie side by side, or neither

    __device__ __forceinline__ Caps(const Stretch& s, u64 start)
        : caps((const Bits*)s.caps), channels((u32)s.channels), inner((u32)s.inner)
    {
        const bool adjacent = inner == 1 && channels % SIZE == 0 && start % SIZE == 0 && s.caps % 16 == 0;
        kind = inner % SIZE == 0 && start % SIZE == 0 ? SHARED : adjacent ? ADJACENT : ANY;
        start += (u64)threadIdx.x * SIZE;
        channel = (u32)(start / inner % channels);
        within = (u32)(start % inner);
        channels_on = THREADS * SIZE / inner % channels;
        within_on = THREADS * SIZE % inner;
    }

    __device__ __forceinline__ void next()
    {
        within += within_on;
        channel += within >= inner ? channels_on + 1 : channels_on;
        // A difference below zero is larger than anything.
        within = smaller(within, within - inner);
        channel = smaller(channel, channel - channels);
    }

    // Cap the values from number `from` of the load on. `lowest` becomes the smallest of their caps but zeros, less by one.
    template <int PART>
    __device__ __forceinline__ void limit(int from, const Bits (&bits)[PART], Bits (&capped)[PART], Bits& lowest) const
    {
        if (kind == SHARED) {
            const Bits one = __ldg(caps + channel);
            lowest = one - 1;
#pragma unroll
            for (int i = 0; i < PART; i++)
                capped[i] = smaller(one, bits[i]);
            return;
        }
        if (kind == ADJACENT) {
            const uint4* fours = (const uint4*)(caps + channel + from);
#pragma unroll
            for (int i = 0; i < PART * (int)sizeof(Bits) / 16; i++)
                *(uint4*)&capped[i * (16 / sizeof(Bits))] = __ldg(fours + i);
        } else {
            u32 c = channel, w = within + from;
            for (; w >= inner; w -= inner)
                c = c + 1 == channels ? 0 : c + 1;
#pragma unroll
            for (int i = 0; i < PART; i++) {
                capped[i] = __ldg(caps + c);
                if (++w == inner) {
                    w = 0;
                    c = c + 1 == channels ? 0 : c + 1;
                }
            }
        }
        lowest = ~(Bits)0;
#pragma unroll
        for (int i = 0; i < PART; i++) {
            lowest = smaller(lowest, (Bits)(capped[i] - 1));
            capped[i] = smaller(capped[i], bits[i]);
        }
    }
};

template <class T> static __device__ __forceinline__ T warp_sum(T value)
{
#pragma unroll
    for (int d = 16; d; d /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, d);
    return value;
}

template <class T> static __device__ __forceinline__ T warp_smallest(T value)
{
#pragma unroll
    for (int d = 16; d; d /= 2)
        value = smaller(value, __shfl_xor_sync(0xffffffffu, value, d));
    return value;
}

// Whether this was the tensor's last stretch; what the others wrote before is then seen.
static __device__ bool last_of_tensor(double* results, const Stretch& s)
{
    __threadfence();
    return atomicAdd((u64*)results + s.ticket, 1ull) + 1 == s.stretches;
}

// What a thread finds.
template <class F, int CAPPED> struct Findings {
    typedef typename F::Bits Bits;
    Histogram<F, 1 + CAPPED> counts, capped;
    double sum, squares;
    Bits most, least;  // `least` is less by one, so that zeros are largest
    u32 nans;

    __device__ __forceinline__ Findings(u32* words, u32* low)
        : counts(words, low, 0), capped(words, low, CAPPED), sum(0), squares(0), most(0), least(~(Bits)0), nans(0)
    {
    }

    // Take in values, and what their caps leave of them; `lowest` is as `Caps::limit` has it.
    template <int SIZE>
    __device__ __forceinline__ void add(const Bits (&bits)[SIZE], const Bits (&cap)[SIZE], Bits lowest)
    {
        const Bits special = (Bits)(F::FIELDS - 1) << F::MANTISSA, normal = (Bits)1 << F::MANTISSA;
        Bits top = 0, bottom = ~(Bits)0;
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            counts.add(bits[i], 1);
            top = larger(top, bits[i]);
            bottom = smaller(bottom, (Bits)(bits[i] - 1));
            if (CAPPED)
                capped.add(cap[i], 1);
        }
        least = smaller(least, bottom);
        if (F::SUBNORMALS && smaller(bottom, lowest) < normal - 1) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                counts.add_subnormal(bits[i]);
                if (CAPPED && bits[i] <= special)
                    capped.add_subnormal(cap[i]);
            }
        }
        if (top < special) {
            most = larger(most, top);
#pragma unroll
            for (int i = 0; i < SIZE; i++)
                add_real(bits[i]);
        } else {
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                if (bits[i] < special) {
                    most = larger(most, bits[i]);
                    add_real(bits[i]);
                } else if (bits[i] > special) {
                    nans++;
                    if (CAPPED)  // nothing caps a NaN
                        capped.add(cap[i], ~0u);
                }
            }
        }
    }

    __device__ __forceinline__ void add_real(Bits bits)
    {
        const double real = F::real(bits);
        sum += real;
        squares = __fma_rn(real, real, squares);
    }
};

// A stretch as loads: whole ones at multiples of 16 bytes, and fewer values than a load has before and behind them.
template <class F> struct Loads {
    enum { SIZE = Size<F>::LOAD };
    const typename F::Raw* values;
    u32 before, whole, behind;

    __device__ __forceinline__ explicit Loads(const Stretch& s) : values((const typename F::Raw*)s.address)
    {
        before = smaller((u32)(0 - s.address) % 16 / (u32)sizeof(typename F::Raw), (u32)s.length);
        whole = ((u32)s.length - before) / SIZE;
        behind = ((u32)s.length - before) % SIZE;
    }

    __device__ __forceinline__ uint4 load(u32 number) const { return __ldg((const uint4*)(values + before) + number); }

    // The number in the stretch of a value outside of whole loads, of which each thread takes one; false without any.
    __device__ __forceinline__ bool single(u32& number) const
    {
        number = threadIdx.x < before ? threadIdx.x : threadIdx.x + whole * SIZE;
        return threadIdx.x < before + behind;
    }
};

template <class F, int CAPPED> static __device__ __forceinline__ void measure_stretch(const Stretch* table, double* results)
{
    typedef typename F::Bits Bits;
    enum { SIZE = Size<F>::LOAD, PART = Size<F>::PART };
    const Bits special = (Bits)(F::FIELDS - 1) << F::MANTISSA;
    __shared__ __align__(16) u32 words[WORDS];
    __shared__ u32 low[128];
    __shared__ double sums[2][WARPS];
    __shared__ Bits extremes[2][WARPS];
    __shared__ u32 zeros, nans, infinities;

#pragma unroll 4
    for (int i = threadIdx.x; i < WORDS / 4; i += THREADS)
        ((uint4*)words)[i] = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < 128; i += THREADS)
        low[i] = 0;
    if (threadIdx.x == 0)
        zeros = nans = infinities = 0;
    const Stretch s = table[blockIdx.x];
    const Loads<F> loads(s);
    Findings<F, CAPPED> found(words, low);
    __syncthreads();

    u32 number;
    if (loads.single(number)) {
        Bits bits[1] = {magnitude<F>(loads.values[number])}, capped[1] = {}, lowest = ~(Bits)0;
        if (CAPPED) {
            const Bits cap = ((const Bits*)s.caps)[(s.first + number) / s.inner % s.channels];
            lowest = cap - 1;
            capped[0] = smaller(cap, bits[0]);
        }
        found.add(bits, capped, lowest);
    }
    if (threadIdx.x < loads.whole) {
        const u32 last = loads.whole - 1;
        Caps<F> caps(CAPPED ? s : Stretch(), s.first + loads.before);
        uint4 raw[2];  // loads that are under way
        raw[0] = loads.load(threadIdx.x);
        raw[1] = loads.load(smaller(threadIdx.x + THREADS, last));
        for (u32 at = threadIdx.x; at <= last; at += 2 * THREADS) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if (k && at + THREADS > last)
                    break;
                Bits bits[PART], capped[PART] = {}, lowest = ~(Bits)0;
                unpack<F>(raw[k], 0, bits);
                const uint4 now = raw[k];
                raw[k] = loads.load(smaller(at + (k + 2) * THREADS, last));
#pragma unroll
                for (int from = 0; from < SIZE; from += PART) {
                    if (from)
                        unpack<F>(now, from, bits);
                    if (CAPPED)
                        caps.limit(from, bits, capped, lowest);
                    found.add(bits, capped, lowest);
                }
                if (CAPPED)
                    caps.next();
            }
        }
    }
    const double sum = warp_sum(found.sum), squares = warp_sum(found.squares);
    const Bits most = ~warp_smallest((Bits)~found.most), least = warp_smallest(found.least);
    if (threadIdx.x % 32 == 0) {
        sums[0][threadIdx.x / 32] = sum;
        sums[1][threadIdx.x / 32] = squares;
        extremes[0][threadIdx.x / 32] = most;
        extremes[1][threadIdx.x / 32] = least;
    }
    if (found.nans)
        atomicAdd(&nans, found.nans);
    __syncthreads();

    const Stretch& again = table[blockIdx.x];  // read once more: in registers it would be in the way of the loop
    double* packed = results + again.out;
    u32 first, last;
    if (CAPPED)
        found.capped.flush(results + again.capped_out, first, last);
    found.counts.flush(packed, first, last);
    if (first)
        atomicAdd(&zeros, first);
    if (last)
        atomicAdd(&infinities, last);
    __syncthreads();

    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; w++) {
            sums[0][0] += sums[0][w];
            sums[1][0] += sums[1][w];
            extremes[0][0] = larger(extremes[0][0], extremes[0][w]);
            extremes[1][0] = smaller(extremes[1][0], extremes[1][w]);
        }
        if (zeros)
            atomicAdd(packed, (double)zeros);
        if (infinities != nans)
            atomicAdd(packed + 1, (double)(infinities - nans));
        if (nans)
            atomicAdd(packed + 2, (double)nans);
        atomicMax((u64*)packed + 3, (u64)__double_as_longlong(F::real(extremes[0][0])));
        // Positive doubles and their bits have the same order. Until the last stretch, what is kept of the smallest is
        // its distance from infinity, because results begin as zeros.
        const u64 infinity = 0x7ff0000000000000ull;
        const Bits smallest = smaller((Bits)(extremes[1][0] + 1), special);
        u64 distance = smallest ? infinity - (u64)__double_as_longlong(F::real(smallest)) : 0;
        u64* absmin = (u64*)packed + 4;
        atomicMax(absmin, distance);
        atomicAdd(packed + 5, sums[0][0]);
        atomicAdd(packed + 6, sums[1][0]);
        if (last_of_tensor(results, again)) {
            distance = atomicAdd(absmin, 0ull);
            *absmin = distance ? infinity - distance : 0;
        }
    }
}

// The largest magnitude of each channel, as the bits of a float, with `out` as the address of the results. Of tensors of
// rows in which channels lie side by side: a block takes `length` rows from `address` on, and of each 32 loads from
// column `first` on.
template <class F> static __device__ __forceinline__ void channels_beside(const Stretch& given, u32 (*largest)[32 * 8])
{
    typedef typename F::Raw Raw;
    enum { SIZE = Size<F>::LOAD };
    const Stretch s = given;  // all that the loop reads is in registers
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool wide = s.address % 16 == 0 && s.channels % SIZE == 0 && s.first % SIZE == 0;
    const u64 column = s.first + (wide ? lane * SIZE : lane);
    const Raw* values = (const Raw*)s.address + column;
    u32 found[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++)
        found[i] = 0;
    if (wide && column < s.channels) {
#pragma unroll 4
        for (u64 row = warp; row < s.length; row += WARPS) {
            u32 bits[SIZE];
            unpack<F>(__ldg((const uint4*)(values + row * s.channels)), 0, bits);
#pragma unroll
            for (int i = 0; i < SIZE; i++)
                found[i] = larger(found[i], bits[i]);
        }
    } else if (!wide) {
        for (u64 row = warp; row < s.length; row += WARPS)
#pragma unroll
            for (int i = 0; i < SIZE; i++)
                if (column + 32 * i < s.channels)
                    found[i] = larger(found[i], magnitude<F>(values[row * s.channels + 32 * i]));
    }
#pragma unroll
    for (int i = 0; i < SIZE; i++)
        largest[warp][wide ? lane * SIZE + i : lane + 32 * i] = found[i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < 32 * SIZE && s.first + i < s.channels; i += THREADS) {
        u32 top = 0;
        for (int w = 0; w < WARPS; w++)
            top = larger(top, largest[w][i]);
        if (top)
            atomicMax((u32*)s.out + s.first + i, top);
    }
}

// The same where the `inner` values of one channel lie side by side: a block takes `length` parts from part `first` on,
// of which each run of a channel has as many as it needs. `address` is that of the tensor.
#define PART 8192
template <class F> static __device__ __forceinline__ void channels_apart(const Stretch& given)
{
    typedef typename F::Raw Raw;
    enum { SIZE = Size<F>::LOAD };
    const Stretch s = given;
    const u32 lane = threadIdx.x % 32;
    const u64 parts = (s.inner + PART - 1) / PART;
    for (u64 part = s.first + threadIdx.x / 32; part < s.first + s.length; part += WARPS) {
        const u64 run = part / parts, begin = part % parts * PART;
        const u32 count = (u32)smaller((u64)PART, s.inner - begin);
        const Raw* values = (const Raw*)s.address + run * s.inner + begin;
        const u32 in_loads = (u64)values % 16 ? 0 : count / SIZE * SIZE;
        u32 top = 0;
#pragma unroll 4
        for (u32 at = lane * SIZE; at < in_loads; at += 32 * SIZE) {
            u32 bits[SIZE];
            unpack<F>(__ldg((const uint4*)(values + at)), 0, bits);
#pragma unroll
            for (int i = 0; i < SIZE; i++)
                top = larger(top, bits[i]);
        }
        for (u32 at = in_loads + lane; at < count; at += 32)
            top = larger(top, magnitude<F>(values[at]));
        top = ~warp_smallest(~top);
        if (lane == 0 && top)
            atomicMax((u32*)s.out + run % s.channels, top);
    }
}

// For each warp a word for each value of 32 loads; the same memory for all formats.
static __device__ __forceinline__ u32 (*largest_of_warps())[32 * 8]
{
    __shared__ u32 words[WARPS][32 * 8];
    return words;
}

// Either, by the number of values that share a channel.
template <class F> static __device__ __forceinline__ void channels_of_stretch(const Stretch& s, double*)
{
    if (s.inner == 1)
        channels_beside<F>(s, largest_of_warps());
    else
        channels_apart<F>(s);
}

// The 2-norm of each tensor.
template <class F> static __device__ __forceinline__ void norms_of_stretch(const Stretch* table, double* results)
{
    enum { SIZE = Size<F>::LOAD };
    __shared__ double sums[WARPS];
    const Stretch s = table[blockIdx.x];
    const Loads<F> loads(s);
    double squares = 0;
    u32 number;
    if (loads.single(number)) {
        const double real = F::real(magnitude<F>(loads.values[number]));
        squares = real * real;
    }
#pragma unroll 4
    for (u32 at = threadIdx.x; at < loads.whole; at += THREADS) {
        typename F::Bits bits[SIZE];
        unpack<F>(loads.load(at), 0, bits);
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const double real = F::real(bits[i]);
            squares = __fma_rn(real, real, squares);
        }
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = squares;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; w++)
            squares += sums[w];
        double* norm = results + s.out;
        atomicAdd(norm, squares);
        if (last_of_tensor(results, s))
            *norm = sqrt(atomicAdd(norm, 0.0));
    }
}

// The largest magnitude of each tensor, as the bits of a float: `out` is its place among floats in the results. NaN if the
// tensor holds one.
template <class F> static __device__ __forceinline__ void largest_of_stretch(const Stretch& s, double* results)
{
    enum { SIZE = Size<F>::LOAD };
    const Loads<F> loads(s);
    u32 top = 0, number;
    if (loads.single(number))
        top = magnitude<F>(loads.values[number]);
#pragma unroll 4
    for (u32 at = threadIdx.x; at < loads.whole; at += THREADS) {
        u32 bits[SIZE];
        unpack<F>(loads.load(at), 0, bits);
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            top = larger(top, bits[i]);
    }
    top = ~warp_smallest(~top);
    if (threadIdx.x % 32 == 0 && top)
        atomicMax((u32*)results + s.out, top);
}

// One launch for tensors of several formats: modules' outputs and their gradients have two or three under autocast.
#define OF_ANY_FORMAT(name)                                                                        \
    static __device__ __forceinline__ void name##_of_any(const Stretch* table, double* results) \
    {                                                                                              \
        const Stretch& s = table[blockIdx.x];                                                      \
        if (s.format == 0)                                                                         \
            name##_of_stretch<Fp32>(s, results);                                                   \
        else if (s.format == 1)                                                                    \
            name##_of_stretch<Fp16>(s, results);                                                   \
        else                                                                                       \
            name##_of_stretch<Bf16>(s, results);                                                   \
    }
OF_ANY_FORMAT(channels)
OF_ANY_FORMAT(largest)

// One program is compiled for each FORMAT, of so many BITS. A multiprocessor has 65536 registers: SMALL leaves 40 to a
// thread, and so room for three blocks, LARGE 56 and two.
#define SMALL __launch_bounds__(THREADS, 3)
#define LARGE __launch_bounds__(THREADS + THREADS / 8, 2)
#define KERNEL(name, size, call)                                                      \
    extern "C" __global__ void size name(const Stretch* table, double* results) \
    {                                                                                 \
        call(table, results);                                                         \
    }

#if BITS == 16 || BITS == 32
KERNEL(measure, SMALL, (measure_stretch<FORMAT, 0>))
#else
KERNEL(measure, LARGE, (measure_stretch<FORMAT, 0>))
#endif
#if BITS == 32
KERNEL(channels, LARGE, channels_of_any)
KERNEL(largest, SMALL, largest_of_any)
#endif
#if BITS >= 16
KERNEL(capped, LARGE, (measure_stretch<FORMAT, 1>))
KERNEL(norms, SMALL, norms_of_stretch<FORMAT>)
#endif
