/* python.h - the Python side (forebay.data, forebay.text) as a child process that speaks JSON lines.
 *
 * Interpreter: $FOREBAY_PYTHON, else the build's venv when it is there, else python3 on PATH.  The package is
 * found beside the command (../python, ../share/forebay/python, ./python) or in the source tree, and put first on
 * PYTHONPATH.  The child's standard error is collected; when it ends badly, its last line is the error sentence and its exit
 * code the status (2 config, 3 input, else failed).
 * Threads: one a child. */
#ifndef FB_IO_PYTHON_H
#define FB_IO_PYTHON_H

#include <signal.h>

#include "base/error.h"

typedef struct fb_python fb_python;

/* module: "forebay.text"; args: NULL-terminated, after the module's name. */
fb_status fb_python_start(fb_python **out, const char *module, const char *const *args, fb_error *err);
/* Sends one line of JSON, reads one line back (owned by p, valid until the next call). */
fb_status fb_python_ask(fb_python *p, const char *request, const char **reply, fb_error *err);
/* While an answer is awaited, *stop turning non-zero interrupts the child, and asking returns FB_STOPPED. */
void fb_python_set_stop(fb_python *p, const volatile sig_atomic_t *stop);
/* Closes its input and waits for it.  Frees p whatever happens. */
fb_status fb_python_finish(fb_python *p, fb_error *err);

#endif
