// `distances_plain` of stats/blocks.py for CUDA, behind kernels.cu, of which it uses the first lines.
//
// A block of threads takes a tile of the matrix, which is 128 columns wide: each warp one row at a time, each thread four
// values of it, always in the same columns. Counts and sums are kept in shared memory, in as many copies as there are
// lanes in half a warp, so that neighbours whose values lie at the same distance rarely wait for one another.

struct Tile {      // a row of the table
    u64 values;    // address of the matrix of floats
    u64 factors;   // address of a float for each block of the matrix
    u64 tops;      // address of a double for each of them
    u64 width;     // columns of the matrix
    u64 first;     // row of the tile
    u64 length;    // its rows
    u64 column;    // its first column
    u64 rows;      // of a block
    u64 columns;   // of a block
    u64 exponent;  // to which the factor brings the top of a block
};

#define FINE (EIGHTHS * FINE_OCTAVES)
#define BINS (FINE + OCTAVES - FINE_OCTAVES)

struct Distances {
    enum { COPIES = 16, VALUES = 4 };
    double sums[2][BINS][COPIES];  // of tops, and of their squares
    u32 counts[BINS][COPIES];
    u32 ties[OCTAVES];

    __device__ __forceinline__ void add(u32 scaled, double top, int highest)
    {
        const u32 copy = threadIdx.x % COPIES;
        const int eighths = highest - (int)(scaled >> 20);
        const int octave = smaller(eighths >> 3, OCTAVES - 1);
        const int bin = larger(eighths < FINE ? eighths : octave + FINE - FINE_OCTAVES, 0);
        atomicAdd(&counts[bin][copy], 1u);
        atomicAdd(&sums[0][bin][copy], top);
        atomicAdd(&sums[1][bin][copy], top * top);
        if ((scaled & 0x7fffffu) == 0)
            atomicAdd(&ties[larger(octave, 0)], 1u);
    }
};

static __device__ __forceinline__ void distances_of_tile(const Tile* table, double* results)
{
    __shared__ Distances found;
    for (int i = threadIdx.x; i < BINS * Distances::COPIES; i += THREADS)
        (&found.sums[0][0][0])[i] = (&found.sums[1][0][0])[i] = 0, (&found.counts[0][0])[i] = 0;
    for (int i = threadIdx.x; i < OCTAVES; i += THREADS)
        found.ties[i] = 0;
    const Tile t = table[blockIdx.x];
    const u32 lane = threadIdx.x % 32, width = (u32)t.width, rows = (u32)t.rows;
    const bool wide = t.width % Distances::VALUES == 0 && t.values % 16 == 0;
    const int highest = ((int)t.exponent + 127) << 3 | 7;
    const u32 across = (width + (u32)t.columns - 1) / (u32)t.columns;
    u32 column[Distances::VALUES], block[Distances::VALUES];
#pragma unroll
    for (u32 i = 0; i < Distances::VALUES; i++) {
        column[i] = (u32)t.column + (wide ? lane * Distances::VALUES + i : lane + 32 * i);
        block[i] = smaller(column[i], width - 1) / (u32)t.columns;
    }
    const u32 end = (u32)(t.first + t.length);
    const u32 down_on = WARPS / rows, within_on = WARPS % rows;
    u32 row = (u32)t.first + threadIdx.x / 32, down = row / rows, within = row % rows;
    __syncthreads();

    for (; row < end; row += WARPS) {
        const float* values = (const float*)t.values + (u64)row * width;
        const float* factors = (const float*)t.factors + (u64)down * across;
        const double* tops = (const double*)t.tops + (u64)down * across;
        float value[Distances::VALUES] = {0, 0, 0, 0};
        if (wide && column[0] < width) {
            const uint4 raw = __ldg((const uint4*)(values + column[0]));
            const u32 words[Distances::VALUES] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int i = 0; i < Distances::VALUES; i++)
                value[i] = __uint_as_float(words[i]);
        } else if (!wide) {
#pragma unroll
            for (int i = 0; i < Distances::VALUES; i++)
                if (column[i] < width)
                    value[i] = __ldg(values + column[i]);
        }
#pragma unroll
        for (int i = 0; i < Distances::VALUES; i++)
            if (value[i] > 0)
                found.add(__float_as_uint(value[i] * __ldg(factors + block[i])), __ldg(tops + block[i]), highest);
        within += within_on;
        down += down_on;
        if (within >= rows)
            within -= rows, down++;
    }
    __syncthreads();

    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        double count = 0, sum = 0, square = 0;
        for (int i = 0; i < Distances::COPIES; i++) {
            count += found.counts[bin][i];
            sum += found.sums[0][bin][i];
            square += found.sums[1][bin][i];
        }
        if (count) {
            atomicAdd(results + bin, count);
            atomicAdd(results + BINS + bin, sum);
            atomicAdd(results + 2 * BINS + bin, square);
        }
        if (bin < OCTAVES && found.ties[bin])
            atomicAdd(results + 3 * BINS + bin, (double)found.ties[bin]);
    }
}

#if BITS == 32
extern "C" __global__ void LARGE distances(const Tile* table, double* results) { distances_of_tile(table, results); }
#endif
