// Rows of the embedding, and their gradient.
#pragma once
#include "fours.h"

// embedded[t] = table[tokens[t]] + bias; scaled = embedded scale. A block a token.
template <typename T>
DEVICE void embed(const T* table, const i64* tokens, const f32* bias, const f32* scale, f32* embedded, f32* scaled, u32 width) {
  const u64 from = static_cast<u64>(tokens[block_index()]) * width, to = static_cast<u64>(block_index()) * width;
  for (u32 column = thread_index(); column < width; column += BLOCK) {
    const f32 value = wide(table[from + column]) + bias[column];
    embedded[to + column] = value;
    scaled[to + column] = value * scale[column];
  }
}
KERNEL(embedding_f32, 256, LIMIT(32, 0, 8),
       (const f32* table, const i64* tokens, const f32* bias, const f32* scale, f32* embedded, f32* scaled, u32 width)) {
  embed(table, tokens, bias, scale, embedded, scaled, width);
}
KERNEL(embedding_bf16, 256, LIMIT(32, 0, 8),
       (const bf16* table, const i64* tokens, const f32* bias, const f32* scale, f32* embedded, f32* scaled, u32 width)) {
  embed(table, tokens, bias, scale, embedded, scaled, width);
}

// Places that a block looks through at once.
constexpr u32 LISTED = 8 * BLOCK;

DEVICE u32 ones(u32 bits) {
  bits -= bits >> 1 & 0x55555555u;
  bits = (bits & 0x33333333u) + (bits >> 2 & 0x33333333u);
  return ((bits + (bits >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24;
}
// Whether of each of 32 lanes, a bit each.
DEVICE u32 of_lanes(bool own) {
  u32 bits = own ? 1u << thread_index() % 32 : 0u;
  bits |= shuffle<1>(bits);
  bits |= shuffle<2>(bits);
  bits |= shuffle<4>(bits);
  bits |= shuffle<8>(bits);
  bits |= shuffle<16>(bits);
  return bits;
}

// table[tokens[t]] += grad[t] scale, token by token in order. A block has every token that leaves its number when divided by the
// number of blocks: it lists where those stand, 2,048 places at once, and adds their rows in that order; a row of the table stays in
// registers as long as its token comes again. There are at most 512 blocks, so that for each token as many times 8 bytes are read out of
// a cache, whatever the number of tokens.
template <bool WHOLE>
DEVICE void embed_back(const i64* tokens, const f32* scale, const f32* grad, f32* table, u32* words, u32* list, u32 count, u32 width,
                       u32 blocks) {
  constexpr u32 AHEAD = WHOLE ? 4 : 1, WORDS = LISTED / 32;
  const u32 group = thread_index() / 32;
  for (u32 base = 0; base < count; base += LISTED) {
    u32 own = 0;
    UNROLL
    for (u32 turn = 0; turn < LISTED / BLOCK; ++turn) {
      const u32 index = base + turn * BLOCK + thread_index();
      const bool here = index < count && static_cast<u32>(tokens[index]) % blocks == block_index();
      own |= static_cast<u32>(here) << turn;
      const u32 bits = of_lanes(here);
      if (thread_index() % 32 == 0) words[turn * (BLOCK / 32) + group] = bits;
    }
    barrier();
    for (u32 turn = 0; turn < LISTED / BLOCK; ++turn) {
      if ((own >> turn & 1u) == 0) continue;
      const u32 word = turn * (BLOCK / 32) + group;
      u32 place = ones(words[word] & ((1u << thread_index() % 32) - 1));
      for (u32 before = 0; before < word; ++before) place += ones(words[before]);
      list[place] = base + turn * BLOCK + thread_index();
    }
    u32 listed = 0;
    for (u32 word = 0; word < WORDS; ++word) listed += ones(words[word]);
    barrier();
    for (u32 column = 4 * thread_index(); column < width; column += SPAN) {
      const Four by = of_vector<WHOLE>(scale, column, width);
      i64 current = -1;
      Packed<f32> sum = {};
      const auto row_of_table = [=](i64 token) { return table + static_cast<u64>(token) * width; };
      for (u32 first = 0; first < listed; first += AHEAD) {
        i64 token[AHEAD];
        Packed<f32> from[AHEAD];
        UNROLL
        for (u32 next = 0; next < AHEAD; ++next) {
          const u32 place = list[first + next < listed ? first + next : first];
          token[next] = tokens[place];
          from[next] = load<WHOLE>(grad + static_cast<u64>(place) * width, column, width);
        }
        UNROLL
        for (u32 next = 0; next < AHEAD; ++next) {
          if (first + next >= listed) continue;
          if (token[next] != current) {
            if (current >= 0) store<WHOLE>(row_of_table(current), column, width, sum);
            current = token[next];
            sum = load<WHOLE>(row_of_table(current), column, width);
          }
          UNROLL
          for (u32 each = 0; each < 4; ++each) sum.all.at[each] += from[next].all.at[each] * by.at[each];
        }
      }
      if (current >= 0) store<WHOLE>(row_of_table(current), column, width, sum);
    }
    barrier();
  }
}
KERNEL(embedding_backward, 256, LIMIT(104, 8448, 4, 8),
       (const i64* tokens, const f32* scale, const f32* grad, f32* table, u32 count, u32 width, u32 blocks)) {
  SHARED(u32, words, LISTED / 32);
  SHARED(u32, list, LISTED);
  if (by_fours(width, grad, table)) embed_back<true>(tokens, scale, grad, table, words, list, count, width, blocks);
  else embed_back<false>(tokens, scale, grad, table, words, list, count, width, blocks);
}
