// Sorts, looks up and hashes more than a small budget holds.
const numbers = new Float64Array(2e6);
for (let at = 0; at < numbers.length; at++) numbers[at] = (at * 2654435761) % 1000003;
numbers.sort();
let sum = 0;
for (let at = 0; at < numbers.length; at += 101) sum += numbers[at];
const map = new Map();
for (let at = 0; at < 3e5; at++) map.set(at * 7, 'value ' + at);
let all = 0;
for (const [key, value] of map) all = (all * 31 + key + value.length) | 0;
const bytes = Buffer.alloc(20 << 20, 'abc');
const hash = require('crypto').createHash('sha256').update(bytes).digest('hex');
console.log(sum, all, map.size, hash);
if (typeof WebAssembly !== 'undefined') {
  const memory = new WebAssembly.Memory({ initial: 100, maximum: 1000 });
  memory.grow(200);
  const words = new Uint32Array(memory.buffer);
  for (let at = 0; at < words.length; at++) words[at] = at;
  let odd = 0;
  for (let at = 0; at < words.length; at += 97) odd = (odd + words[at]) | 0;
  // (func (export "add") (param i32 i32) (result i32) local.get 0 local.get 1 i32.add)
  const code = new Uint8Array([
    0, 97, 115, 109, 1, 0, 0, 0, 1, 7, 1, 96, 2, 127, 127, 1, 127, 3, 2, 1, 0, 7, 7, 1, 3, 97, 100,
    100, 0, 0, 10, 9, 1, 7, 0, 32, 0, 32, 1, 106, 11,
  ]);
  const instance = new WebAssembly.Instance(new WebAssembly.Module(code));
  console.log(odd, instance.exports.add(40, 2));
}
