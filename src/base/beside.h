/* beside.h - files that are installed with the program. */
#ifndef FB_BASE_BESIDE_H
#define FB_BASE_BESIDE_H

#include <stdbool.h>
#include <stddef.h>

/* The first of the n places, relative to the folder of the executable and then to that of the library with this code
 * ("", "/../lib"), in which `name` can be read: its path, in out. */
bool fb_find_beside(char *out, size_t size, const char *const *places, size_t n, const char *name);

#endif
