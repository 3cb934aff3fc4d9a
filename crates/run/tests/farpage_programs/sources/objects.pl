# Counts words in a hash, and prints the most frequent ones.
use strict;
use warnings;
my ($seed, %counts) = (7);
for (1 .. 700_000) {
    $seed = ($seed * 1103515245 + 12345) % 2147483648;
    $counts{ "word-" . ($seed >> 8) % 350_000 }++;
}
my @order = sort { $counts{$b} <=> $counts{$a} || $a cmp $b } keys %counts;
print scalar(@order), "\n";
print "$_ $counts{$_}\n" for @order[ 0 .. 99 ];
