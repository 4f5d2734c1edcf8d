#include "base/beside.h"

#include <assert.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Cuts the path of a file down to its folder, without a slash at the end; false: it has none. */
static bool to_folder(char *path)
{
    char *slash = strrchr(path, '/');
    if (slash)
        *slash = '\0';
    return slash != NULL;
}

bool fb_find_beside(char *out, size_t size, const char *const *places, size_t n, const char *name)
{
    char from[2][PATH_MAX];
    int n_from = 0;
    assert(out);
    Dl_info self;
    ssize_t len = readlink("/proc/self/exe", from[0], sizeof from[0] - 1);
    if (len > 0) {
        from[0][len] = '\0';
        n_from += to_folder(from[0]);
    }
    if (dladdr((void *)(uintptr_t)fb_find_beside, &self) && self.dli_fname && realpath(self.dli_fname, from[n_from]))
        n_from += to_folder(from[n_from]);
    for (int i = 0; i < n_from; i++)
        for (size_t k = 0; k < n; k++) {
            int length = snprintf(out, size, "%s%s/%s", from[i], places[k], name);
            if (length > 0 && (size_t)length < size && access(out, R_OK) == 0)
                return true;
        }
    return false;
}
