/* A library (LIBRARY) that finds functions of the C library itself, and a program that is linked to
 * it. The library frees the program's blocks, and stands before the C library with functions of the
 * same names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define VERSION "GLIBC_2.2.5"

void free_as_found_early(void *block);
void free_as_found_next(void *block);
void free_as_found_by_version(void *block);
extern int calls, ioctls;

#ifdef LIBRARY

typedef void (*freeing)(void *);

int calls, ioctls;
static freeing early;

static void *of_c_library(const char *name) {
    return dlsym(dlopen("libc.so.6", RTLD_LAZY), name);
}

__attribute__((constructor)) static void begin(void) { early = (freeing)of_c_library("free"); }

void free_as_found_early(void *block) { early(block); }

void free_as_found_next(void *block) {
    static freeing next;
    if (!next)
        next = (freeing)dlsym(RTLD_NEXT, "free");
    next(block);
}

void free_as_found_by_version(void *block) {
    static freeing next, of_library;
    if (!next) {
        next = (freeing)dlvsym(RTLD_NEXT, "free", VERSION);
        of_library = (freeing)dlvsym(dlopen("libc.so.6", RTLD_LAZY), "free", VERSION);
    }
    static int calls;
    (calls++ % 2 ? next : of_library)(block);
}

int ioctl(int fd, unsigned long request, ...) {
    int (*next)(int, unsigned long, ...) = (int (*)(int, unsigned long, ...))of_c_library("ioctl");
    va_list arguments;
    va_start(arguments, request);
    ioctls++;
    int result = next(fd, request, va_arg(arguments, void *));
    va_end(arguments);
    return result;
}

pid_t fork(void) {
    pid_t (*next)(void) = (pid_t (*)(void))of_c_library("fork");
    calls++;
    return next();
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    typedef int (*creating)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    calls++;
    return ((creating)of_c_library("pthread_create"))(thread, attributes, start, argument);
}

#else

static void *nothing(void *argument) { return argument; }

int main(void) {
    typedef void (*freeing)(void *);
    freeing by_default = (freeing)dlvsym(RTLD_DEFAULT, "free", VERSION);
    freeing next = (freeing)dlvsym(RTLD_NEXT, "free", VERSION);
    if (!by_default || !next || dlvsym(RTLD_NEXT, "free", "GLIBC_0.1"))
        return 3;
    void **list = NULL;
    for (int i = 0; i < 200000; i++) {
        void **block = malloc(96);
        *block = list, list = block;
    }
    for (int i = 0; list; i++) {
        void **rest = *list;
        if (i % 5 == 0)
            free_as_found_early(list);
        else if (i % 5 == 1)
            free_as_found_by_version(list);
        else if (i % 5 == 2)
            by_default(list);
        else if (i % 5 == 3)
            next(list);
        else
            free_as_found_next(list);
        list = rest;
    }
    pthread_t thread;
    int before = calls, status;
    if (pthread_create(&thread, NULL, nothing, NULL) || pthread_join(thread, NULL))
        return 1;
    pid_t child = fork();
    if (!child)
        _exit(0);
    if (waitpid(child, &status, 0) != child || status)
        return 2;
    int ends[2], bytes, ioctls_before = ioctls;
    if (pipe(ends) || ioctl(ends[0], FIONREAD, &bytes) || ioctls == ioctls_before)
        return 4;
    /* The runtime creates threads, too. */
    puts(calls - before < 2 ? "missed" : "called");
    return 0;
}

#endif
