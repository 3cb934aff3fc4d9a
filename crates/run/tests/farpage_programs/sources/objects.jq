# Makes objects, groups, and counts them.
[range(250000) | {id: ., group: (. * 7919 % 9973), name: "name-\(.)"}]
| group_by(.group)
| map({group: .[0].group, count: length, names: ([.[].name | length] | add)})
| (length, .[0:5], (map(.names) | add))
