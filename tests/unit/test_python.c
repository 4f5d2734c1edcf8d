/* The Python child: small modules in a package of our own play every way to answer, to chatter and to die.
 * The .c is included so that the package and the default interpreter are the test's. */
static const char build_python[] = FB_PYTHON_DEFAULT; /* or PATH's, where it is not there */
static char       source_dir[64], default_python[sizeof build_python + 128];
#undef FB_SOURCE_DIR
#undef FB_PYTHON_DEFAULT
#define FB_SOURCE_DIR     source_dir
#define FB_PYTHON_DEFAULT default_python
#include "../../src/io/python.c"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/stat.h>

#include <cmocka.h>

static const struct {
    const char *name, *text;
} module[] = {
    { "__init__", "" },
    { "echo", "import sys\nfor line in sys.stdin:\n    print(sys.argv[1:], line.rstrip('\\n')[::-1], flush=True)\n" },
    { "env", "import os, sys\nsys.stdin.readline()\n"
             "print(sys.path[0], sys.flags.utf8_mode, os.getcwd() in sys.path or '' in sys.path, sys.path[1], flush=True)\n" },
    { "refuse", "import sys\nsys.stderr.write('a warning\\nit is \\tthe sentence\\n\\n')\nsys.exit(int(sys.argv[1]))\n" },
    { "mute", "import sys\nsys.exit(int(sys.argv[1]))\n" },
    { "crash", "import sys\nsys.stdin.readline()\nraise KeyError('x')\n" },
    { "needs", "import a_module_that_is_not_there\n" },
    { "die", "import os, sys, signal\nsys.stdin.readline()\nsys.stderr.write('so far so good')\nsys.stderr.flush()\n"
             "os.kill(os.getpid(), int(sys.argv[1]))\n" },
    { "big", "import sys\nfor line in sys.stdin:\n    print('x' * int(line), flush=True)\n" },
    { "noisy", "import sys\nsys.stderr.write('e' * (1 << 20) + '\\nlast line')\nsys.stderr.flush()\n"
               "print('answer to ' + sys.stdin.readline(), end='', flush=True)\nsys.exit(int(sys.argv[1]))\n" },
    /* fills both of its outputs in the middle of reading the request */
    { "crosswise", "import os, sys\nfirst = os.read(0, 1)\nos.write(1, b'o' * (1 << 21))\nos.write(2, b'e' * (1 << 20))\n"
                   "n = 1\nlast = first\nwhile last[-1:] != b'\\n':\n    last = os.read(0, 65536)\n    n += len(last)\n"
                   "os.write(1, b' %d\\n' % n)\n" },
    { "eager", "print('hello', flush=True)\nimport sys\nsys.stderr.write('said')\nsys.stderr.flush()\nsys.stdin.read()\n" },
    { "deaf", "import os, time\nos.close(0)\nos.write(2, b'I do not listen\\n')\ntime.sleep(0.3)\nos._exit(3)\n" },
    { "twice", "import sys\nsys.stdin.readline()\nsys.stdout.write('one\\ntwo\\n')\nsys.stdout.flush()\nsys.stdin.read()\n" },
    { "tail", "import sys\nsys.stdin.read()\nsys.stdout.write('x' * (1 << 20))\nsys.exit(int(sys.argv[1]))\n" },
    { "orphan", "import os, sys, time\npid = os.fork()\nif pid == 0:\n    time.sleep(20)\n    os._exit(0)\n"
                "sys.stdin.readline()\nsys.stderr.write(str(pid) + '\\n')\nsys.stderr.flush()\nos._exit(3)\n" },
};

static fb_python *start(const char *name, const char *argument)
{
    fb_python *p;
    fb_error   err;
    char       full[64];
    snprintf(full, sizeof full, "forebay.%s", name);
    if (fb_python_start(&p, full, (const char *const[]){ argument, NULL }, &err) != FB_OK)
        fail_msg("%s", err.msg);
    return p;
}

static void check_ask_fails(fb_python *p, const char *request, fb_status want, const char *sentence)
{
    const char *reply = NULL;
    fb_error    err = { 0 };
    fb_status   st = fb_python_ask(p, request, &reply, &err);
    assert_null(reply);
    if (st != want || err.status != want || strcmp(err.msg, sentence) != 0)
        fail_msg("expected %d '%s', got %d '%s'", want, sentence, st, err.msg);
}

static void check_finish(fb_python *p, fb_status want, const char *sentence)
{
    fb_error  err = { 0 };
    fb_status st = fb_python_finish(p, &err);
    if (st != want || strcmp(err.msg, sentence) != 0)
        fail_msg("expected %d '%s', got %d '%s'", want, sentence, st, err.msg);
}

static void questions_are_answered_in_turn(void **state)
{
    (void)state;
    fb_error    err;
    const char *reply;
    fb_python  *p;
    assert_int_equal(fb_python_start(&p, "forebay.echo", (const char *const[]){ "a b", "--c", NULL }, &err), FB_OK);
    assert_int_equal(fb_python_ask(p, "{\"k\": 1}", &reply, &err), FB_OK);
    assert_string_equal(reply, "['a b', '--c'] }1 :\"k\"{");
    assert_int_equal(fb_python_ask(p, "\xc3\xa9\xe2\x82\xac", &reply, &err), FB_OK); /* UTF-8 whatever the locale */
    assert_string_equal(reply, "['a b', '--c'] \xe2\x82\xac\xc3\xa9");
    assert_int_equal(fb_python_ask(p, "", &reply, &err), FB_OK);
    assert_string_equal(reply, "['a b', '--c'] ");
    assert_int_equal(fb_python_finish(p, &err), FB_OK);

    assert_int_equal(fb_python_start(&p, "forebay.echo", NULL, &err), FB_OK);
    assert_int_equal(fb_python_finish(p, &err), FB_OK);
    assert_int_equal(fb_python_finish(NULL, &err), FB_OK);
}

static void the_package_comes_first_and_the_current_folder_not_at_all(void **state)
{
    (void)state;
    const char *reply;
    fb_error    err;
    char        want[256];
    setenv("PYTHONPATH", "/a/users/own", 1);
    fb_python *p = start("env", NULL);
    unsetenv("PYTHONPATH");
    assert_int_equal(fb_python_ask(p, "", &reply, &err), FB_OK);
    snprintf(want, sizeof want, "%s/python 1 False /a/users/own", source_dir);
    assert_string_equal(reply, want);
    check_finish(p, FB_OK, "");
}

static void exit_codes_become_statuses_and_the_last_line_the_sentence(void **state)
{
    (void)state;
    static const struct {
        const char *code;
        fb_status   status;
        const char *sentence;
    } how[] = { { "2", FB_CONFIG, "it is  the sentence" }, { "3", FB_INPUT, "it is  the sentence" },
                 { "1", FB_FAILED, "forebay.refuse failed with exit code 1: it is  the sentence" },
                 { "9", FB_FAILED, "forebay.refuse failed with exit code 9: it is  the sentence" } };
    for (size_t i = 0; i < FB_COUNT(how); i++) {
        check_finish(start("refuse", how[i].code), how[i].status, how[i].sentence);
        fb_python *p = start("refuse", how[i].code);
        check_ask_fails(p, "{}", how[i].status, how[i].sentence);
        check_ask_fails(p, "{}", how[i].status, how[i].sentence); /* gone is gone */
        check_finish(p, how[i].status, how[i].sentence);
    }
    check_finish(start("mute", "3"), FB_INPUT, "forebay.mute ended with exit code 3 and said nothing");
    check_finish(start("mute", "0"), FB_OK, "");
    fb_python *p = start("mute", "0");
    check_ask_fails(p, "{}", FB_FAILED, "forebay.mute ended without an answer");
    check_finish(p, FB_OK, "");
    p = start("crash", NULL);
    check_ask_fails(p, "{}", FB_FAILED, "forebay.crash failed with exit code 1: KeyError: 'x'");
    check_finish(p, FB_FAILED, "forebay.crash failed with exit code 1: KeyError: 'x'");
}

static void a_signal_is_named(void **state)
{
    (void)state;
    char number[8];
    snprintf(number, sizeof number, "%d", SIGTERM);
    fb_python *p = start("die", number);
    check_ask_fails(p, "{}", FB_FAILED, "forebay.die was killed by SIGTERM; its last words: so far so good");
    check_finish(p, FB_FAILED, "forebay.die was killed by SIGTERM; its last words: so far so good");
    snprintf(number, sizeof number, "%d", SIGKILL);
    p = start("die", number);
    check_ask_fails(p, "{}", FB_FAILED,
                    "forebay.die was killed by SIGKILL, as the kernel does when memory runs out; its last words: so far so good");
    fb_python_finish(p, NULL);
}

static void wait_for_its_words(fb_python *p)
{
    while (!p->n_tail) {
        struct pollfd fd = { .fd = p->err, .events = POLLIN };
        assert_int_equal(poll(&fd, 1, -1), 1);
        assert_true(take_err(p));
    }
}

/* SIGPIPE gets its default action: raised, it ends the test. */
static void a_child_that_does_not_read_does_not_kill_us(void **state)
{
    (void)state;
    size_t n = 5 << 20;
    char  *request = malloc(n + 1);
    memset(request, 'r', n);
    request[n] = 0;
    void (*before)(int) = signal(SIGPIPE, SIG_DFL);
    fb_python *p = start("refuse", "3");
    check_ask_fails(p, request, FB_INPUT, "it is  the sentence");
    check_finish(p, FB_INPUT, "it is  the sentence");
    p = start("deaf", NULL);
    wait_for_its_words(p);
    check_ask_fails(p, "{}", FB_INPUT, "I do not listen");
    check_finish(p, FB_INPUT, "I do not listen");
    signal(SIGPIPE, before);
    free(request);
}

static void large_answers_arrive_whole(void **state)
{
    (void)state;
    const char *reply;
    fb_error    err;
    fb_python  *p = start("big", NULL);
    static const size_t size[] = { 5000000, 0, 65535, 65536, 131071, 131072 };
    for (size_t i = 0; i < FB_COUNT(size); i++) {
        char request[32];
        snprintf(request, sizeof request, "%zu", size[i]);
        assert_int_equal(fb_python_ask(p, request, &reply, &err), FB_OK);
        assert_int_equal(strlen(reply), size[i]);
        assert_int_equal(strspn(reply, "x"), size[i]);
    }
    check_finish(p, FB_OK, "");
}

static void standard_error_never_blocks_and_its_end_is_kept(void **state)
{
    (void)state;
    const char *reply;
    fb_error    err;
    fb_python  *p = start("noisy", "3");
    assert_int_equal(fb_python_ask(p, "me", &reply, &err), FB_OK);
    assert_string_equal(reply, "answer to me");
    check_finish(p, FB_INPUT, "last line");
    check_finish(start("noisy", "0"), FB_OK, ""); /* also while it is being waited for */
}

static void full_pipes_both_ways_do_not_deadlock(void **state)
{
    (void)state;
    const char *reply;
    fb_error    err;
    size_t      n = 5 << 20;
    char       *request = malloc(n + 1);
    memset(request, 'r', n);
    request[n] = 0;
    fb_python *p = start("crosswise", NULL);
    assert_int_equal(fb_python_ask(p, request, &reply, &err), FB_OK);
    assert_int_equal(strspn(reply, "o"), 1 << 21);
    assert_string_equal(reply + (1 << 21), " 5242881");
    check_finish(p, FB_OK, "");
    check_finish(start("tail", "0"), FB_OK, ""); /* output that nobody asked for, at the end */
    free(request);
}

static void words_out_of_turn_are_refused(void **state)
{
    (void)state;
    fb_python *p = start("twice", NULL);
    check_ask_fails(p, "{}", FB_FAILED,
                    "forebay.twice answered with more than one line of text; its standard output is for answers only");
    check_finish(p, FB_OK, "");
    p = start("eager", NULL);
    wait_for_its_words(p); /* they come after its standard output, which then is there */
    check_ask_fails(p, "{}", FB_FAILED,
                    "forebay.eager wrote to its standard output before it was asked; that is for answers only");
    check_finish(p, FB_OK, "");
}

/* Streams that a grandchild holds open do not keep us waiting: it outlives the call. */
static void a_grandchild_is_not_waited_for(void **state)
{
    (void)state;
    const char *reply;
    fb_error    err;
    fb_python  *p = start("orphan", NULL);
    assert_int_equal(fb_python_ask(p, "{}", &reply, &err), FB_INPUT);
    pid_t pid = (pid_t)atoi(err.msg);
    assert_true(pid > 1);
    assert_int_equal(kill(pid, SIGKILL), 0);
    fb_python_finish(p, NULL);
}

/* Would wait for ever if the second had inherited our end of the first one's input. */
static void two_children_end_apart(void **state)
{
    (void)state;
    const char *reply;
    fb_error    err;
    fb_python  *first = start("echo", NULL), *second = start("echo", NULL);
    check_finish(first, FB_OK, "");
    assert_int_equal(fb_python_ask(second, "ab", &reply, &err), FB_OK);
    assert_string_equal(reply, "[] ba");
    check_finish(second, FB_OK, "");
}

/* With our own 0, 1 and 2 closed the pipes would get those numbers, and what we print would go down them. */
static void closed_standard_streams_do_not_confuse(void **state)
{
    (void)state;
    int   status;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const char *reply;
        fb_python  *p;
        for (int fd = 0; fd < 3; fd++)
            close(fd);
        if (fb_python_start(&p, "forebay.noisy", (const char *const[]){ "0", NULL }, NULL) != FB_OK)
            _exit(1);
        for (int fd = 0; fd < 3; fd++)
            if (fcntl(fd, F_GETFD) >= 0)
                _exit(4);
        if (fb_python_ask(p, "me", &reply, NULL) != FB_OK || strcmp(reply, "answer to me") != 0)
            _exit(2);
        _exit(fb_python_finish(p, NULL) == FB_OK ? 0 : 3);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

static void what_is_missing_is_named_with_the_remedy(void **state)
{
    (void)state;
    fb_error   err;
    fb_python *p = NULL;
    p = start("nothing", NULL);
    assert_int_equal(fb_python_finish(p, &err), FB_FAILED);
    assert_non_null(strstr(err.msg, "forebay.nothing cannot start: "));
    assert_non_null(strstr(err.msg, "No module named forebay.nothing; " REMEDY));
    check_finish(start("needs", NULL), FB_FAILED,
                 "forebay.needs cannot start: ModuleNotFoundError: No module named 'a_module_that_is_not_there'; " REMEDY);

    p = NULL;
    setenv("FOREBAY_PYTHON", "/no/such/python", 1);
    assert_int_equal(fb_python_start(&p, "forebay.echo", NULL, &err), FB_FAILED);
    assert_string_equal(err.msg, "FOREBAY_PYTHON is '/no/such/python', which cannot be run (No such file or directory); " REMEDY);
    unsetenv("FOREBAY_PYTHON");
    assert_null(p);

    char *path = strdup(getenv("PATH"));
    strcpy(default_python, "/no/default/python");
    setenv("PATH", "/no/such/folder", 1);
    assert_int_equal(fb_python_start(&p, "forebay.echo", NULL, &err), FB_FAILED);
    assert_string_equal(err.msg, "no Python can be run: python3 gives 'No such file or directory' (/no/default/python is the "
                        "build's); run `make check` in the source tree, or " REMEDY);
    setenv("PATH", path, 1);
    free(path);
    check_finish(start("mute", "2"), FB_CONFIG, "forebay.mute ended with exit code 2 and said nothing"); /* PATH's python3 */
    strcpy(default_python, build_python);

    char kept = source_dir[0];
    source_dir[0] = 'x';
    assert_int_equal(fb_python_start(&p, "forebay.echo", NULL, &err), FB_FAILED);
    assert_non_null(strstr(err.msg, "the Python package forebay is neither beside the command"));
    source_dir[0] = kept;
    assert_null(p);
}

/* $FOREBAY_PYTHON, else the build's, else PATH's: a script that only says its name and code stands for each. */
static void the_interpreter_is_chosen_in_order(void **state)
{
    (void)state;
    char chosen[128];
    snprintf(chosen, sizeof chosen, "%s/chosen", source_dir);
    snprintf(default_python, sizeof default_python, "%s/default", source_dir);
    for (int i = 0; i < 2; i++) {
        FILE *f = fopen(i ? chosen : default_python, "w");
        fprintf(f, "#!/bin/sh\necho \"%s $1 $2\" >&2\nexit 3\n", i ? "chosen" : "default");
        fclose(f);
        chmod(i ? chosen : default_python, 0755);
    }
    check_finish(start("echo", NULL), FB_INPUT, "default -m forebay.echo");
    setenv("FOREBAY_PYTHON", chosen, 1);
    check_finish(start("echo", NULL), FB_INPUT, "chosen -m forebay.echo");
    setenv("FOREBAY_PYTHON", "", 1);
    check_finish(start("echo", NULL), FB_INPUT, "default -m forebay.echo");
    unsetenv("FOREBAY_PYTHON");
    unlink(chosen);
    unlink(default_python);
    strcpy(default_python, build_python);
}

static int make_package(void **state)
{
    (void)state;
    char path[160];
    unsetenv("FOREBAY_PYTHON");
    unsetenv("PYTHONPATH");
    setenv("PYTHONDONTWRITEBYTECODE", "1", 1);
    strcpy(default_python, build_python);
    strcpy(source_dir, P_tmpdir "/test_python.XXXXXX");
    if (!mkdtemp(source_dir))
        return -1;
    snprintf(path, sizeof path, "%s/python", source_dir);
    mkdir(path, 0700);
    snprintf(path, sizeof path, "%s/python/forebay", source_dir);
    mkdir(path, 0700);
    for (size_t i = 0; i < FB_COUNT(module); i++) {
        snprintf(path, sizeof path, "%s/python/forebay/%s.py", source_dir, module[i].name);
        FILE *f = fopen(path, "w");
        if (!f || fputs(module[i].text, f) < 0 || fclose(f) != 0)
            return -1;
    }
    return 0;
}

static int remove_package(void **state)
{
    (void)state;
    char path[160];
    for (size_t i = 0; i < FB_COUNT(module); i++) {
        snprintf(path, sizeof path, "%s/python/forebay/%s.py", source_dir, module[i].name);
        unlink(path);
    }
    snprintf(path, sizeof path, "%s/python/forebay", source_dir);
    rmdir(path);
    snprintf(path, sizeof path, "%s/python", source_dir);
    rmdir(path);
    return rmdir(source_dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(questions_are_answered_in_turn),
        cmocka_unit_test(the_package_comes_first_and_the_current_folder_not_at_all),
        cmocka_unit_test(exit_codes_become_statuses_and_the_last_line_the_sentence),
        cmocka_unit_test(a_signal_is_named),
        cmocka_unit_test(a_child_that_does_not_read_does_not_kill_us),
        cmocka_unit_test(large_answers_arrive_whole),
        cmocka_unit_test(standard_error_never_blocks_and_its_end_is_kept),
        cmocka_unit_test(full_pipes_both_ways_do_not_deadlock),
        cmocka_unit_test(words_out_of_turn_are_refused),
        cmocka_unit_test(a_grandchild_is_not_waited_for),
        cmocka_unit_test(two_children_end_apart),
        cmocka_unit_test(closed_standard_streams_do_not_confuse),
        cmocka_unit_test(what_is_missing_is_named_with_the_remedy),
        cmocka_unit_test(the_interpreter_is_chosen_in_order),
    };
    return cmocka_run_group_tests(tests, make_package, remove_package);
}
