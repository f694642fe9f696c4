// exp, log and erf in plain arithmetic, so that they are the same functions on every device and on a CPU.
#pragma once
#include "ground.h"

// e^x to about two units in the last place: 2^n times a polynomial on half an octave around zero. The CPU's of
// src/ops/cpu/experts.rs, to the bit.
DEVICE f32 exponential(f32 x) {
  constexpr f32 INTEGER = 12582912.0f;  // added to a number below 2^22, leaves its nearest integer in the last bits
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const f32 sum = x * 1.44269504088896340736f + INTEGER;
  const f32 octave = sum - INTEGER;
  const f32 rest = x - octave * 0.6933594f - octave * -2.1219444e-4f;
  f32 value = 1.9875691e-4f;
  value = value * rest + 1.3981999e-3f;
  value = value * rest + 8.333452e-3f;
  value = value * rest + 4.1665796e-2f;
  value = value * rest + 1.6666665e-1f;
  value = value * rest + 0.5f;
  const u32 exponent = (bits_of(sum) - bits_of(INTEGER) + 127u) << 23;
  return (value * rest * rest + rest + 1.0f) * from_bits(exponent);
}

// log x of a normal number above zero, in f64 to about 1e-15: the exponent, and the series of the inverse hyperbolic tangent
// on half an octave around one.
DEVICE f64 logarithm(f64 x) {
  if (!(x > 0.0 && x < 1e300)) return x;  // of a sum of exponentials: not a number, or infinite
  u64 bits = bits_of(x);
  i64 exponent = static_cast<i64>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
  f64 mantissa = from_bits(bits);
  if (mantissa > 1.4142135623730951) {
    mantissa *= 0.5;
    exponent += 1;
  }
  const f64 s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
  f64 series = 0.0;
  UNROLL
  for (int term = 23; term >= 1; term -= 2) series = series * square + 1.0 / term;
  return static_cast<f64>(exponent) * 0.6931471805599453 + 2.0 * s * series;
}

// The factors of erf's power series: of each term, and from each power to the next one. In memory: as numbers in the code they would
// take more registers than there are.
struct Series {
  f64 own[64], next[64];
};
DEVICE constexpr Series series_of_erf() {
  Series all = {};
  for (int term = 0; term < 64; ++term) {
    all.own[term] = 1.0 / (2 * term + 1);
    all.next[term] = -1.0 / (term + 1);
  }
  return all;
}
CONSTANT Series ERF = series_of_erf();

// erf x in f64 to about 1e-9, by 64 terms of its power series; beyond 4 it is one for an f32. Terms of odd number are negative. Where
// one is below 2^-55 of the sum, which is less than half a unit in its last place, later ones are smaller and change no bit of it.
DEVICE f64 error_function(f64 x) {
  if (x >= 4.0) return 1.0;
  if (x <= -4.0) return -1.0;
  const f64 square = x * x;
  f64 power = 1.0, sum = 0.0;
  ROLLED
  for (int first = 0; first < 64; first += 4) {
    f64 own = 0.0;
    UNROLL
    for (int term = first; term < first + 4; ++term) {
      own = power * ERF.own[term];
      sum += own;
      power *= square * ERF.next[term];
    }
    if (own > sum * -0x1p-55) break;
  }
  return 1.1283791670955126 * x * sum;
}
