/* Hashes every leaf of a record's rows in one call. `ctypes` calls it without the interpreter's
   lock, so an engine's thread never waits for a hash. The hash itself is the one of the xxhash
   package, whose address the caller passes. */

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t low, high;
} hash128;

typedef hash128 (*hash_function)(const void *data, size_t num_bytes);

static void put_big_endian(unsigned char *out, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (unsigned char)(value >> (56 - 8 * i));
}

/* Writes 16 bytes per leaf to `out`: the canonical form of the hash, in the order of the leaves. No
   leaf crosses a row; the last leaf of a row may be shorter. */
void kvferry_hash_leaves(hash_function hash, const unsigned char *rows, size_t num_rows,
                         size_t row_bytes, size_t leaf_bytes, unsigned char *out)
{
    for (size_t row = 0; row < num_rows; row++, rows += row_bytes) {
        for (size_t at = 0; at < row_bytes; at += leaf_bytes, out += 16) {
            size_t rest = row_bytes - at;
            hash128 found = hash(rows + at, rest < leaf_bytes ? rest : leaf_bytes);
            put_big_endian(out, found.high);
            put_big_endian(out + 8, found.low);
        }
    }
}
