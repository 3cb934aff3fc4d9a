# Counts words in an array, and prints the most frequent ones.
BEGIN {
    seed = 7
    for (i = 0; i < 400000; i++) {
        seed = (seed * 1103515 + 12345) % 2147483648
        counts["word-" int(seed / 256) % 200000]++
    }
    PROCINFO["sorted_in"] = "@ind_str_asc"
    for (word in counts) if (counts[word] > 5) print word, counts[word]
    print length(counts)
}
