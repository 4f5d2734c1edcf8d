#include "io/python.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "io/sys.h"

enum {
    TAIL_SIZE = 16384,   /* of standard error; the last line is what counts */
    POLL_MS = 200,       /* how often a silent child is asked whether it still lives */
    READ_SIZE = 65536,
    REPLY_MAX = 1 << 30, /* a reply this long is a fault, not an answer */
};
#define REMEDY "set FOREBAY_PYTHON to a Python (3.11 or later) that has the packages of requirements.txt"

/* in is a socket and not a pipe, because a write to a pipe whose reader has died raises SIGPIPE, which kills a program
 * that did not ask for that, and masking signals around each write is a dance in every caller's thread; send() on a
 * socket takes MSG_NOSIGNAL.  To the child it is a file descriptor like any other. */
struct fb_python {
    char  *module;
    pid_t  pid;
    int    in, out, err;       /* our ends of its standard streams; -1 once closed */
    bool   ended;              /* waited for: status holds */
    int    status;
    char  *reply;              /* n_reply bytes of the line being read */
    size_t n_reply, reply_capacity;
    char   tail[TAIL_SIZE];    /* the end of its standard error */
    size_t n_tail;
    const volatile sig_atomic_t *stop; /* NULL: nobody stops it */
};

/* ---- what is run ---- */

static const char *find_interpreter(bool *asked)
{
    const char *chosen = getenv("FOREBAY_PYTHON");
    *asked = chosen && *chosen;
    if (*asked)
        return chosen;
    return access(FB_PYTHON_DEFAULT, X_OK) == 0 ? FB_PYTHON_DEFAULT : "python3";
}

static bool holds_package(char *dir, size_t size, const char *base, const char *below)
{
    char package[PATH_MAX];
    int  n = snprintf(dir, size, "%s/%s", base, below);
    int  m = snprintf(package, sizeof package, "%s/%s/forebay", base, below);
    return n > 0 && (size_t)n < size && m > 0 && (size_t)m < sizeof package && access(package, R_OK | X_OK) == 0;
}

/* The folder that holds the package forebay. */
static fb_status find_package(char *dir, size_t size, fb_error *err)
{
    static const char *const beside[] = { "../python", "../share/forebay/python", "python" };
    char    exe[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n > 0) {
        exe[n] = 0;
        *strrchr(exe, '/') = 0; /* the link is always absolute */
        for (size_t i = 0; i < FB_COUNT(beside); i++)
            if (holds_package(dir, size, exe, beside[i]))
                return FB_OK;
    }
    if (holds_package(dir, size, FB_SOURCE_DIR, "python"))
        return FB_OK;
    return fb_fail(err, FB_FAILED, "the Python package forebay is neither beside the command (../python,"
                   " ../share/forebay/python, python) nor in the source tree; run `make install` again");
}

static void free_list(char **list)
{
    for (char **s = list; s && *s; s++)
        free(*s);
    free(list);
}

/* Our environment, with three settings of our own: the package first on the path; the current folder not on it, where
 * -m would put it before everything else, so that a stray json.py there would be run; text in UTF-8 whatever the locale. */
static char **make_environment(const char *package_dir)
{
    static const char *const own[] = { "PYTHONPATH=", "PYTHONSAFEPATH=", "PYTHONUTF8=" };
    size_t n = 0, to = 0;
    while (environ[n])
        n++;
    char **list = calloc(n + FB_COUNT(own) + 1, sizeof *list);
    if (!list)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        bool replaced = false;
        for (size_t j = 0; j < FB_COUNT(own); j++)
            replaced |= !strncmp(environ[i], own[j], strlen(own[j]));
        if (!replaced && !(list[to++] = strdup(environ[i])))
            goto nomem;
    }
    const char *path = getenv("PYTHONPATH");
    bool        more = path && *path;
    if (asprintf(&list[to], "PYTHONPATH=%s%s%s", package_dir, more ? ":" : "", more ? path : "") < 0) {
        list[to] = NULL;
        goto nomem;
    }
    if (!(list[++to] = strdup("PYTHONSAFEPATH=1")) || !(list[++to] = strdup("PYTHONUTF8=1")))
        goto nomem;
    return list;
nomem:
    free_list(list);
    return NULL;
}

/* ---- starting ---- */

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* Above 2: a process whose own standard streams are closed gets 0, 1 and 2 from pipe(), and what it prints later would
 * go to the child as a question. */
static bool lift(int *fd)
{
    if (*fd > 2)
        return true;
    int high = fcntl(*fd, F_DUPFD_CLOEXEC, 3);
    close_fd(fd);
    *fd = high;
    return high >= 0;
}

typedef struct ends {
    int in[2], out[2], err[2]; /* ours, the child's */
} ends;

static bool open_ends(ends *e)
{
    int pipe_out[2], pipe_err[2];
    *e = (ends){ { -1, -1 }, { -1, -1 }, { -1, -1 } };
    /* Close-on-exec from birth: another thread that starts a process meanwhile must not hand these on, or the child
     * would never see the end of its input. */
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, e->in) != 0) {
        e->in[0] = e->in[1] = -1;
        return false;
    }
    if (pipe2(pipe_out, O_CLOEXEC) != 0)
        return false;
    e->out[0] = pipe_out[0], e->out[1] = pipe_out[1];
    if (pipe2(pipe_err, O_CLOEXEC) != 0)
        return false;
    e->err[0] = pipe_err[0], e->err[1] = pipe_err[1];
    for (int i = 0; i < 2; i++)
        if (!lift(&e->in[i]) || !lift(&e->out[i]) || !lift(&e->err[i]))
            return false;
    return true;
}

static void close_ends(ends *e)
{
    for (int i = 0; i < 2; i++) {
        close_fd(&e->in[i]);
        close_fd(&e->out[i]);
        close_fd(&e->err[i]);
    }
}

/* posix_spawn and not fork: it does not copy the page tables of a process that may have mapped a terabyte, is safe
 * beside threads, and reports a failing exec as its own result. */
static int spawn(pid_t *pid, const char *interpreter, char *const *argv, char *const *env, const ends *e)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t          attributes;
    sigset_t                   none, defaults;
    int                        rc = posix_spawn_file_actions_init(&actions);
    if (rc)
        return rc;
    if ((rc = posix_spawnattr_init(&attributes))) {
        posix_spawn_file_actions_destroy(&actions);
        return rc;
    }
    /* A blocked or ignored signal is inherited; the child gets a clean slate, so that Ctrl-C ends it too. */
    sigemptyset(&none);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    sigaddset(&defaults, SIGINT);
    sigaddset(&defaults, SIGTERM);
    if (!(rc = posix_spawn_file_actions_adddup2(&actions, e->in[1], 0)) &&
        !(rc = posix_spawn_file_actions_adddup2(&actions, e->out[1], 1)) &&
        !(rc = posix_spawn_file_actions_adddup2(&actions, e->err[1], 2)) &&
        !(rc = posix_spawnattr_setsigmask(&attributes, &none)) &&
        !(rc = posix_spawnattr_setsigdefault(&attributes, &defaults)) &&
        !(rc = posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF)))
        rc = posix_spawnp(pid, interpreter, &actions, &attributes, argv, env);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return rc;
}

static void python_free(fb_python *p)
{
    close_fd(&p->in);
    close_fd(&p->out);
    close_fd(&p->err);
    free(p->module);
    free(p->reply);
    free(p);
}

fb_status fb_python_start(fb_python **out, const char *module, const char *const *args, fb_error *err)
{
    fb_status   st = FB_OK;
    ends        e = { { -1, -1 }, { -1, -1 }, { -1, -1 } };
    char        package_dir[PATH_MAX], **env = NULL;
    const char **argv = NULL;
    bool        asked;
    const char *interpreter = find_interpreter(&asked);
    fb_python  *p = calloc(1, sizeof *p);
    if (!p)
        return fb_fail(err, FB_NOMEM, "no memory to start Python");
    p->in = p->out = p->err = -1;
    FB_TRY(find_package(package_dir, sizeof package_dir, err));

    size_t n = 0;
    while (args && args[n])
        n++;
    if (!(p->module = strdup(module)) || !(env = make_environment(package_dir)) || !(argv = calloc(n + 4, sizeof *argv))) {
        st = fb_fail(err, FB_NOMEM, "no memory to start Python");
        goto done;
    }
    argv[0] = interpreter;
    argv[1] = "-m";
    argv[2] = module;
    for (size_t i = 0; i < n; i++)
        argv[3 + i] = args[i];

    if (!open_ends(&e)) {
        st = fb_fail(err, FB_FAILED, "no pipe to Python can be opened (%s); raise `ulimit -n`", strerror(errno));
        goto done;
    }
    int rc = spawn(&p->pid, interpreter, (char *const *)argv, env, &e);
    if (rc && asked) {
        st = fb_fail(err, FB_FAILED, "FOREBAY_PYTHON is '%.150s', which cannot be run (%s); " REMEDY, interpreter, strerror(rc));
        goto done;
    }
    if (rc) {
        st = fb_fail(err, FB_FAILED, "no Python can be run: %s gives '%s' (%.150s is the build's); run `make check` in the"
                     " source tree, or " REMEDY, interpreter, strerror(rc), FB_PYTHON_DEFAULT);
        goto done;
    }
    p->in = e.in[0], p->out = e.out[0], p->err = e.err[0];
    e.in[0] = e.out[0] = e.err[0] = -1;
    *out = p;
    p = NULL;
done:
    close_ends(&e);
    free(argv);
    free_list(env);
    if (p)
        python_free(p);
    return st;
}

/* ---- how it ended ---- */

static bool has_ended(fb_python *p, int flags)
{
    while (!p->ended) {
        pid_t got = waitpid(p->pid, &p->status, flags);
        if (got == 0)
            return false;
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) /* somebody else waited for it (SIGCHLD ignored): how it ended is lost */
            p->status = 0;
        p->ended = true;
    }
    return true;
}

/* The last line of standard error that says anything, with control characters made blank. */
static const char *last_line(fb_python *p)
{
    size_t end = p->n_tail;
    while (end > 0 && (unsigned char)p->tail[end - 1] <= ' ')
        end--;
    size_t start = end;
    while (start > 0 && p->tail[start - 1] != '\n')
        start--;
    while (start < end && (unsigned char)p->tail[start] <= ' ')
        start++;
    for (size_t i = start; i < end; i++)
        if ((unsigned char)p->tail[i] < ' ' || p->tail[i] == 0x7f)
            p->tail[i] = ' ';
    p->tail[end] = 0;
    return p->tail + start;
}

/* The sentence for a child that is gone.  answered: it owes us nothing, so ending with 0 is well. */
static fb_status how_it_ended(fb_python *p, bool answered, fb_error *err)
{
    const char *line = last_line(p);
    bool        says = *line;
    if (WIFSIGNALED(p->status)) {
        int         sig = WTERMSIG(p->status);
        const char *name = sigabbrev_np(sig);
        return fb_fail(err, FB_FAILED, "%s was killed by SIG%s%s%s%s", p->module, name ? name : "?",
                       sig == SIGKILL ? ", as the kernel does when memory runs out" : "", says ? "; its last words: " : "", line);
    }
    int code = WEXITSTATUS(p->status);
    if (code == 0 && answered)
        return FB_OK;
    if (code == 0)
        return fb_fail(err, FB_FAILED, "%s ended without an answer%s%s", p->module, says ? "; its last words: " : "", line);
    fb_status st = FB_FAILED;
    if (code == fb_status_exit_code(FB_CONFIG))
        st = FB_CONFIG;
    if (code == fb_status_exit_code(FB_INPUT))
        st = FB_INPUT;
    if (!says)
        return fb_fail(err, st, "%s ended with exit code %d and said nothing", p->module, code);
    if (st != FB_FAILED)
        return fb_fail(err, st, "%s", line); /* a sentence that it wrote for the user */
    if (strstr(line, "No module named"))
        return fb_fail(err, st, "%s cannot start: %s; " REMEDY, p->module, line);
    return fb_fail(err, st, "%s failed with exit code %d: %s", p->module, code, line);
}

/* ---- talking ---- */

static void keep_tail(fb_python *p, const char *text, size_t n)
{
    enum { ROOM = TAIL_SIZE - 1 }; /* last_line ends it with a zero */
    if (n > ROOM) {
        text += n - ROOM;
        n = ROOM;
    }
    if (p->n_tail + n > ROOM) {
        size_t drop = p->n_tail + n - ROOM;
        memmove(p->tail, p->tail + drop, p->n_tail - drop);
        p->n_tail -= drop;
    }
    memcpy(p->tail + p->n_tail, text, n);
    p->n_tail += n;
}

/* Reads once what there is; false at the end of the stream. */
static bool take_err(fb_python *p)
{
    char    buf[READ_SIZE];
    ssize_t n = fb_sys_read(p->err, buf, sizeof buf);
    if (n > 0)
        keep_tail(p, buf, (size_t)n);
    return n > 0 || (n < 0 && errno == EINTR);
}

static fb_status take_out(fb_python *p, bool *open, fb_error *err)
{
    if (p->reply_capacity - p->n_reply < READ_SIZE) {
        size_t capacity = p->reply_capacity ? 2 * p->reply_capacity : 2 * READ_SIZE;
        char  *more = capacity <= 2u * REPLY_MAX ? realloc(p->reply, capacity) : NULL;
        if (!more)
            return fb_fail(err, FB_NOMEM, "no memory for an answer of more than %zu bytes from %s", p->n_reply, p->module);
        p->reply = more;
        p->reply_capacity = capacity;
    }
    ssize_t n = fb_sys_read(p->out, p->reply + p->n_reply, p->reply_capacity - p->n_reply);
    *open = n > 0 || (n < 0 && errno == EINTR);
    p->n_reply += n > 0 ? (size_t)n : 0;
    return FB_OK;
}

/* Waits up to timeout_ms for anything on the streams that are open and moves it along; *n of *text is still to be sent.
 * All three streams are served in one place, so neither side can wait for ever on a full pipe that the other does not
 * empty. */
static fb_status pump(fb_python *p, const char **text, size_t *n, int timeout_ms, bool *moved, fb_error *err)
{
    fb_status     st = FB_OK;
    bool          open = false;
    struct pollfd fd[3] = { { .fd = *n ? p->in : -1, .events = POLLOUT },
                            { .fd = p->out, .events = POLLIN },
                            { .fd = p->err, .events = POLLIN } };
    int           ready = poll(fd, 3, timeout_ms);
    *moved = ready > 0;
    if (ready < 0 && errno != EINTR)
        return fb_fail(err, FB_FAILED, "waiting for %s failed (%s)", p->module, strerror(errno));
    if (ready <= 0)
        return FB_OK;
    if (fd[2].revents && !take_err(p))
        close_fd(&p->err);
    if (fd[1].revents) {
        FB_TRY(take_out(p, &open, err));
        if (!open)
            close_fd(&p->out);
    }
    if (fd[0].revents) {
        ssize_t sent = send(p->in, *text, *n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            *text += sent;
            *n -= (size_t)sent;
        } else if (errno != EAGAIN && errno != EINTR) {
            close_fd(&p->in); /* it no longer reads; how it ends will say why */
        }
    }
done:
    return st;
}

/* Moves along what comes back, with nothing to send and nobody to read the answer. */
static fb_status pump_away(fb_python *p, int timeout_ms, bool *moved, fb_error *err)
{
    const char *nothing = "";
    size_t      n = 0;
    p->n_reply = 0;
    return pump(p, &nothing, &n, timeout_ms, moved, err);
}

/* Waits for the child, while emptying what it still writes.  The end of its streams does not count, because a process
 * that it started may hold them open. */
static fb_status wait_for_end(fb_python *p, bool answered, fb_error *err)
{
    enum { LEFT_MAX = 64 }; /* reads: more than two pipes can hold */
    fb_status st = FB_OK;
    bool      moved = true;
    close_fd(&p->in);
    while (!has_ended(p, p->out < 0 && p->err < 0 ? 0 : WNOHANG))
        FB_TRY(pump_away(p, POLL_MS, &moved, err));
    moved = true;
    for (int i = 0; i < LEFT_MAX && moved; i++)
        FB_TRY(pump_away(p, 0, &moved, err));
    return how_it_ended(p, answered, err);
done:
    return st;
}

fb_status fb_python_ask(fb_python *p, const char *request, const char **reply, fb_error *err)
{
    fb_status   st = FB_OK;
    bool        moved, all = false, answered = false;
    const char *text = request;
    size_t      n = strlen(request), searched = 0, length = 0; /* of the answer, once it is there */
    assert(!memchr(request, '\n', n));

    FB_TRY(pump_away(p, 0, &moved, err));
    if (p->n_reply) /* it would be taken for this answer */
        return fb_fail(err, FB_FAILED, "%s wrote to its standard output before it was asked; that is for answers only",
                       p->module);
    for (;;) {
        if (p->stop && *p->stop) {
            kill(p->pid, SIGINT); /* as from the keyboard: it tidies up */
            return fb_fail(err, FB_STOPPED, "%s was stopped", p->module);
        }
        if (n == 0 && !all) {
            text = "\n";
            n = 1;
            all = true;
        }
        if (!answered && p->n_reply > searched) {
            const char *newline = memchr(p->reply + searched, '\n', p->n_reply - searched);
            answered = newline != NULL;
            length = answered ? (size_t)(newline - p->reply) : 0;
            searched = p->n_reply;
        }
        if (answered && ((all && n == 0) || p->n_reply > length + 1))
            break;
        if (p->in < 0 || p->out < 0 || p->ended)
            return wait_for_end(p, false, err);
        FB_TRY(pump(p, &text, &n, POLL_MS, &moved, err));
        if (!moved)
            has_ended(p, WNOHANG);
    }
    if (p->n_reply != length + 1 || memchr(p->reply, 0, length))
        return fb_fail(err, FB_FAILED, "%s answered with more than one line of text; its standard output is for answers only",
                       p->module);
    p->reply[length] = 0;
    *reply = p->reply;
done:
    return st;
}

void fb_python_set_stop(fb_python *p, const volatile sig_atomic_t *stop)
{
    p->stop = stop;
}

fb_status fb_python_finish(fb_python *p, fb_error *err)
{
    if (!p)
        return FB_OK;
    fb_status st = wait_for_end(p, true, err);
    python_free(p);
    return st;
}
