/* replay.c - main of a fuzz target without libFuzzer: each file named on the command line, or else of the target's own corpus
 * (FUZZ_CORPUS), once.  Says its result as cmocka does, so that tools/run_tests.py counts it; one test a target, because the size
 * of a corpus says nothing. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "io/file.h"

enum { INPUT_SIZE_MAX = 16 << 20 };

/* A copy of just the right size: one byte further is the sanitizer's. */
static void feed(const char *path)
{
    char    *text;
    uint64_t size;
    fb_error err;
    FUZZ_REQUIRE(fb_file_read(&text, &size, path, INPUT_SIZE_MAX, &err) == FB_OK, "%s", err.msg);
    uint8_t *data = malloc(size ? size : 1);
    FUZZ_REQUIRE(data, "no memory for %s", path);
    memcpy(data, text, size);
    free(text);
    printf("%s\n", path); /* the last one printed is the one that a crash came from */
    fflush(stdout);
    LLVMFuzzerTestOneInput(data, size);
    free(data);
}

static int feed_folder(const char *dir)
{
    struct dirent **entries;
    char            path[FB_PATH_SIZE];
    int             fed = 0, n = scandir(dir, &entries, NULL, alphasort);
    FUZZ_REQUIRE(n >= 0, "%s cannot be read", dir);
    for (int i = 0; i < n; i++) {
        if (entries[i]->d_name[0] != '.' && fb_path_join(path, sizeof path, dir, entries[i]->d_name, NULL) == FB_OK) {
            feed(path);
            fed++;
        }
        free(entries[i]);
    }
    free(entries);
    return fed;
}

int main(int argc, char **argv)
{
    int fed = argc - 1;
    printf("[ RUN      ] corpus\n");
    for (int i = 1; i < argc; i++)
        feed(argv[i]);
    if (argc == 1)
        fed = feed_folder(FUZZ_CORPUS);
    FUZZ_REQUIRE(fed, "%s is empty", FUZZ_CORPUS);
    printf("%d inputs\n[       OK ] corpus\n", fed);
    return 0;
}
