/* Arguments and environments of other programs in memory that is absent. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { MIB = 1 << 20, LENGTH = 100 << 10, COUNT = 4 };

/* Goes through eight budgets, until the page of `text` has left. In a plain run no page leaves. */
static void churn(char *text) {
    static volatile char *others;
    if (!others)
        others = malloc(8 * MIB);
    CHECK(others);
    char *page = (char *)((size_t)text & -(size_t)4096);
    unsigned char there = 1;
    for (int round = 0; there & 1 && round < 16; round++) {
        for (size_t at = 0; at < 8 * MIB; at += 512)
            others[at] = '#';
        CHECK(mincore(page, 4096, &there) == 0);
    }
}

static char letter(int string, int at) { return 'a' + (string * 7 + at) % 26; }

static int is_whole(const char *text, int string) {
    for (int at = 0; at < LENGTH - 1; at++)
        if (text[at] != letter(string, at))
            return 0;
    return text[LENGTH - 1] == 0;
}

/* What the other program has to say about what it was given. */
static int given(int count, char **arguments) {
    CHECK(count == 2 + COUNT);
    for (int i = 0; i < COUNT; i++)
        CHECK(is_whole(arguments[2 + i], i));
    const char *variable = getenv("LONG");
    CHECK(variable && is_whole(variable, COUNT));
    return 0;
}

int main(int count, char **arguments) {
    CHECK(count >= 2);
    const char *how = arguments[1];
    if (!strcmp(how, "given"))
        return given(count, arguments);
    /* Both lists and all strings lie in one remote block. */
    char *block = malloc(4 * MIB), *text = block + 2 * MIB;
    CHECK(block);
    char **list = (char **)block, **variables = (char **)(block + MIB), *strings[COUNT + 1];
    for (int i = 0; i <= COUNT; i++) {
        char *at = text;
        if (i == COUNT)
            text = stpcpy(text, "LONG=");
        for (int j = 0; j < LENGTH - 1; j++)
            *text++ = letter(i, j);
        *text++ = 0;
        strings[i] = at;
    }
    char *path = text;
    strcpy(path, arguments[0]);
    list[0] = path, list[1] = strcpy(path + 4096, "given");
    for (int i = 0; i < COUNT; i++)
        list[2 + i] = strings[i];
    list[2 + COUNT] = NULL;
    variables[0] = strings[COUNT], variables[1] = NULL;
    churn(strings[0]);
    int status = -1;
    pid_t child;
    if (!strcmp(how, "system")) {
        /* The line begins behind a page, so that reading the path has not brought it in. */
        char *line = block + 3 * MIB;
        snprintf(line, PATH_MAX + 64, "exit 7");
        churn(line);
        CHECK(WEXITSTATUS(system(line)) == 7);
        strcpy(line, "echo 42");
        churn(line);
        FILE *out = popen(line, "r");
        int number = 0;
        CHECK(out && fscanf(out, "%d", &number) == 1 && number == 42 && pclose(out) == 0);
        puts("done");
        return 0;
    }
    if (!strcmp(how, "spawn")) {
        CHECK(posix_spawn(&child, path, NULL, NULL, list, variables) == 0);
    } else {
        child = !strcmp(how, "vfork") ? vfork() : fork();
        CHECK(child >= 0);
        if (child == 0) {
            execve(path, list, variables);
            _exit(100 + errno % 100);
        }
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    puts("done");
    return 0;
}
