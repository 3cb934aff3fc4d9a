/* Waits for a debugger, with more memory than the budget. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { COUNT = 4 << 20 };

int *numbers;

int main(void) {
    numbers = malloc(COUNT * sizeof *numbers);
    for (int i = 0; i < COUNT; i++)
        numbers[i] = i;
    printf("%d\n", getpid());
    fflush(stdout);
    /* Until standard input ends. */
    char one;
    while (read(0, &one, 1) > 0)
        ;
    return numbers[5] != 5;
}
