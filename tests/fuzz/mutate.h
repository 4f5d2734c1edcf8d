/* mutate.h - libFuzzer's mutator with a repair behind it, for formats whose length or checksum would stop every mutant at the
 * door.  Three mutants in four are repaired; the fourth tests the door. */
#ifndef FB_FUZZ_MUTATE_H
#define FB_FUZZ_MUTATE_H

#ifdef FB_LIBFUZZER
#include <stddef.h>
#include <stdint.h>

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t size_max);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t size_max, unsigned int seed);
#endif

#endif
