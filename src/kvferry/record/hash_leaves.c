/* Hashes every leaf of a record's rows in one call, and looks at its values while they are in the
   processor's cache. `ctypes` calls it without the interpreter's lock, so an engine's thread never
   waits for a hash. The hash itself is the one of the xxhash package, whose address the caller
   passes. */

#include <stddef.h>
#include <stdint.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

typedef struct {
    uint64_t low, high;
} hash128;

typedef hash128 (*hash_function)(const void *data, size_t num_bytes);

typedef uint64_t __attribute__((aligned(1), may_alias)) word_anywhere;

static void put_big_endian(unsigned char *out, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (unsigned char)(value >> (56 - 8 * i));
}

/* Not 0 if all bits of the exponent are set in some value: it is infinite or no number. `exponent`
   has these bits for each value of a word, `one` the lowest of them: only if all are set, the sum
   carries into the bit above, that of the sign, which is never set before. */
static inline __attribute__((always_inline)) uint64_t
look(const unsigned char *leaf, size_t num_bytes, uint64_t exponent, uint64_t one)
{
    const word_anywhere *words = (const word_anywhere *)leaf;
    size_t num_words = num_bytes / 8;
    uint64_t sums = 0, last = 0;
    for (size_t at = 0; at < num_words; at++)
        sums |= (words[at] & exponent) + one;
    for (size_t at = 8 * num_words; at < num_bytes; at++)
        last = last << 8 | leaf[num_bytes - 1 - (at - 8 * num_words)];
    sums |= (last & exponent) + one;
    return sums & (exponent + one);
}

#ifdef __x86_64__
/* The same in registers twice as wide: the look then costs half. */
__attribute__((target("avx2"))) static uint64_t
look_wide(const unsigned char *leaf, size_t num_bytes, uint64_t exponent, uint64_t one)
{
    return look(leaf, num_bytes, exponent, one);
}

/* Whether processor and system have these registers. The library needs no other, so it asks itself
   what a compiler's library would answer. */
static int are_registers_wide(void)
{
    unsigned int a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX))
        return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    return (saved & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

static uint64_t not_finite(const unsigned char *leaf, size_t num_bytes, uint64_t exponent,
                           uint64_t one)
{
    static int wide; /* 0: not known yet. All threads find the same. */
    if (!wide)
        wide = are_registers_wide() ? 1 : -1;
    return wide > 0 ? look_wide(leaf, num_bytes, exponent, one)
                    : look(leaf, num_bytes, exponent, one);
}
#else
#define not_finite look
#endif

/* Writes 16 bytes per leaf to `out`: the canonical form of the hash, in the order of the leaves. No
   leaf crosses a row; the last leaf of a row may be shorter. Returns whether all values are finite,
   where `exponent` is not 0; see `look`. */
int kvferry_leaves(hash_function hash, const unsigned char *rows, size_t num_rows,
                   size_t row_bytes, size_t leaf_bytes, uint64_t exponent, uint64_t one,
                   unsigned char *out)
{
    uint64_t found = 0;
    for (size_t row = 0; row < num_rows; row++, rows += row_bytes) {
        for (size_t at = 0; at < row_bytes; at += leaf_bytes, out += 16) {
            size_t rest = row_bytes - at, size = rest < leaf_bytes ? rest : leaf_bytes;
            hash128 digest = hash(rows + at, size);
            put_big_endian(out, digest.high);
            put_big_endian(out + 8, digest.low);
            if (exponent)
                found |= not_finite(rows + at, size, exponent, one);
        }
    }
    return found == 0;
}
