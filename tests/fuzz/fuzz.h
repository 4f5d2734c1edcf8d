/* fuzz.h - what the fuzz targets share.
 *
 * A target is one file, fuzz_NAME.c, with LLVMFuzzerTestOneInput: libFuzzer links it in the preset `fuzz`, and in every other
 * build replay.c feeds it the files of corpus/NAME, so that what was once found is tested with any compiler.
 * What a target asserts: bytes are either accepted, and then all that was read from them is within bounds, or refused with the
 * status and the sentence that a user would get. */
#ifndef FB_FUZZ_H
#define FB_FUZZ_H

#include "base/error.h"
#include "io/shard.h"

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* As an assert, but in the targets' own words; ends the process, which is what libFuzzer counts as a finding. */
#define FUZZ_REQUIRE(condition, ...) ((condition) ? (void)0 : fuzz_stop(__FILE__, __LINE__, #condition, __VA_ARGS__))
_Noreturn void fuzz_stop(const char *file, int line, const char *condition, const char *fmt, ...) FB_PRINTF(4, 5);

/* A file in memory that holds these bytes until the next call; its path can be opened. */
const char *fuzz_file(const uint8_t *data, size_t size);
/* A folder in memory, made at the first call and removed at exit. */
const char *fuzz_folder(void);
/* Writes a file of that folder; NULL data removes it. */
void fuzz_put(const char *name, const void *data, size_t size);

/* st is a refusal of kind want, and *err holds one printable sentence with this part in it. */
void fuzz_refused(fb_status st, fb_status want, const fb_error *err, const char *part);
/* Reads every byte, so that a sanitizer sees each. */
void fuzz_touch(const void *data, size_t size);
/* Reads a tensor's every byte. */
void fuzz_read(const fb_tensor *t);
/* Where the first 0xff byte stands, or size: UTF-8 text never holds one, so inputs of several parts are cut there. */
size_t fuzz_cut(const uint8_t *data, size_t size);

#endif
