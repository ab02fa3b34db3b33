// Copies rows between two pools, of which one may be page-locked host memory that the device sees.
//
// A row is `row_bytes` long and is cut into `pieces` of `piece_bytes` (the last may be shorter); the
// blocks of the grid take pieces in turn, so that neither one long row nor one long run of rows waits
// for a single block. All sizes, addresses and distances are multiples of 16 bytes. Rows of the target
// must be distinct, and no byte may be both read and written.
//
// Every argument is 64 bits wide, so that a caller has no widths to get wrong.
//
// Loads and stores are marked as used once: copies must not push what a decode reads out of the L2.

typedef unsigned long long u64;

extern "C" __global__ void __launch_bounds__(512)
copy_rows(u64 target, u64 target_pitch,  // address of row 0, distance between rows
          u64 source, u64 source_pitch,
          u64 row_bytes, u64 piece_bytes, u64 pieces,
          u64 pairs,                     // address of (target row, source row), int32 [rows, 2]
          u64 rows)
{
    const int2* row_pairs = reinterpret_cast<const int2*>(pairs);
    for (u64 piece = blockIdx.x; piece < rows * pieces; piece += gridDim.x) {
        const int2 pair = row_pairs[piece / pieces];
        const u64 offset = piece % pieces * piece_bytes;
        const u64 left = row_bytes - offset;
        const u64 vectors = (left < piece_bytes ? left : piece_bytes) / sizeof(uint4);
        uint4* to = reinterpret_cast<uint4*>(target + (u64)pair.x * target_pitch + offset);
        const uint4* from = reinterpret_cast<const uint4*>(source + (u64)pair.y * source_pitch + offset);

        // Four loads under way at once in every thread: PCIe answers after a microsecond or more.
        const u64 step = blockDim.x;
        u64 at = threadIdx.x;
        for (; at + 3 * step < vectors; at += 4 * step) {
            const uint4 first = __ldcs(from + at);
            const uint4 second = __ldcs(from + at + step);
            const uint4 third = __ldcs(from + at + 2 * step);
            const uint4 fourth = __ldcs(from + at + 3 * step);
            __stcs(to + at, first);
            __stcs(to + at + step, second);
            __stcs(to + at + 2 * step, third);
            __stcs(to + at + 3 * step, fourth);
        }
        for (; at < vectors; at += step)
            __stcs(to + at, __ldcs(from + at));
    }
}
