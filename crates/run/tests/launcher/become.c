// Becomes another program by the function that the first argument names.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

extern char **environ;

int main(int count, char **words) {
    if (count < 8) {
        return 2;
    }
    const char *how = words[1], *path = words[2], *name = strrchr(path, '/') + 1;
    char **rest = words + 2;
    char *none[] = {NULL};
    // Six arguments behind the path: one more than registers hold.
    if (!strcmp(how, "execl")) {
        execl(path, rest[0], rest[1], rest[2], rest[3], rest[4], rest[5], NULL);
    } else if (!strcmp(how, "execlp")) {
        execlp(name, rest[0], rest[1], rest[2], rest[3], rest[4], rest[5], NULL);
    } else if (!strcmp(how, "execle")) {
        execle(path, rest[0], rest[1], rest[2], rest[3], rest[4], rest[5], NULL, none);
    } else if (!strcmp(how, "execv")) {
        execv(path, rest);
    } else if (!strcmp(how, "execvp")) {
        execvp(name, rest);
    } else if (!strcmp(how, "execvpe")) {
        execvpe(name, rest, none);
    } else if (!strcmp(how, "execve")) {
        // What fails leaves the process as it was.
        execve("/no/such/program", rest, environ);
        execve(path, rest, NULL);
    } else if (!strcmp(how, "fexecve")) {
        fexecve(open(path, O_RDONLY | O_CLOEXEC), rest, none);
    } else if (!strcmp(how, "execveat")) {
        execveat(AT_FDCWD, path, rest, none, 0);
    } else if (!strcmp(how, "raw")) {
        syscall(SYS_execve, path, rest, environ);
    }
    perror(how);
    return 1;
}
