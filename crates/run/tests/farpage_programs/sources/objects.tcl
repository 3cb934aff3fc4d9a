# Counts words in an array, and sorts them.
set seed 7
for {set i 0} {$i < 250000} {incr i} {
    set seed [expr {($seed * 1103515245 + 12345) % 2147483648}]
    incr counts(word-[expr {($seed >> 8) % 160000}])
}
set order [lsort [array names counts]]
puts [llength $order]
foreach word [lrange $order 0 99] { puts "$word $counts($word)" }
