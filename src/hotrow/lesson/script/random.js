// The random numbers of torch on a CPU: `torch.manual_seed(seed)`, then `torch.randn(count)`.
//
// Sources: Matsumoto and Nishimura, "Mersenne Twister", 1998; Box and Muller, "A note on the
// generation of random normal deviates", 1958. Numbers are drawn in the same order as in torch.

const WORDS = 624;

// A function that returns the next 32 random bits.
function mersenneTwister(seed) {
  const state = new Uint32Array(WORDS);
  state[0] = seed;
  for (let k = 1; k < WORDS; k++) {
    state[k] = Math.imul(1812433253, state[k - 1] ^ (state[k - 1] >>> 30)) + k;
  }
  let next = WORDS;
  return () => {
    if (next === WORDS) {
      for (let k = 0; k < WORDS; k++) {
        const bits = (state[k] & 0x80000000) | (state[(k + 1) % WORDS] & 0x7fffffff);
        state[k] = state[(k + 397) % WORDS] ^ (bits >>> 1) ^ (bits & 1 ? 0x9908b0df : 0);
      }
      next = 0;
    }
    let bits = state[next++];
    bits ^= bits >>> 11;
    bits ^= (bits << 7) & 0x9d2c5680;
    bits ^= (bits << 15) & 0xefc60000;
    return (bits ^ (bits >>> 18)) >>> 0;
  };
}

// A function `normals(count)`, like `torch.randn`. The last digits can differ from torch's,
// just as torch's own digits differ between processors.
function torchRandom(seed) {
  const draw = mersenneTwister(seed);
  return (count) => (count < 16 ? fewNormals(draw, count) : manyNormals(draw, count));
}

const normals = (seed, count) => torchRandom(seed)(count);

// For up to 15 numbers, torch draws pairs of normals (Box-Muller) in double precision.
function fewNormals(draw, count) {
  const uniform = () => ((draw() & 0x1fffff) * 2 ** 32 + draw()) / 2 ** 53;
  const values = [];
  while (values.length < count) {
    const angle = 2 * Math.PI * uniform();
    const radius = Math.sqrt(-2 * Math.log1p(-uniform()));
    values.push(f32(radius * Math.cos(angle)), f32(radius * Math.sin(angle)));
  }
  return values.slice(0, count);
}

// 16 or more numbers: blocks of 16 in float32. If the last block is short, torch draws the last 16
// numbers again.
function manyNormals(draw, count) {
  const uniform = () => (draw() & 0xffffff) / 2 ** 24;
  const values = Array.from({ length: count }, uniform);
  const transform = (start) => {
    for (let at = start; at < start + 8; at++) {
      const radius = f32(Math.sqrt(f32(-2 * f32(Math.log(f32(1 - values[at]))))));
      const angle = f32(f32(2 * Math.PI) * values[at + 8]);
      values[at] = f32(radius * f32(Math.cos(angle)));
      values[at + 8] = f32(radius * f32(Math.sin(angle)));
    }
  };
  for (let start = 0; start + 16 <= count; start += 16) transform(start);
  if (count % 16) {
    for (let at = count - 16; at < count; at++) values[at] = uniform();
    transform(count - 16);
  }
  return values;
}
