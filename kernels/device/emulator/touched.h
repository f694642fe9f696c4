// What a launch reads and writes, for the clocks of the stand-in (standin/clocks.h): by the kernel's parameters, and by the
// addresses in the rows of its table.
//
// Whoever is not told of is ordered behind nobody, and no race of his is seen. So a kernel with a table that is not named here is
// not found by who would launch it.
#pragma once
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../kernels.h"

struct Touched {
  std::vector<const void*> data;
  std::vector<int> writes;

  void add(const void* address, bool write) {
    if (address == nullptr) return;
    data.push_back(address);
    writes.push_back(write);
  }
  void read(u64 address) { add(reinterpret_cast<const void*>(address), false); }
  void write(u64 address) { add(reinterpret_cast<const void*>(address), true); }

  inline Touched(const emulator::Kernel& kernel, void** arguments);
};

// Tells of so many rows of a table.
using Told = std::function<void(Touched&, const void* rows, u32 count)>;

template <typename Row>
Told rows(void (*row)(Touched&, const Row&)) {
  return [=](Touched& touched, const void* table, u32 count) {
    for (u32 i = 0; i < count; ++i) row(touched, static_cast<const Row*>(table)[i]);
  };
}

// By kernel. The table is its first parameter and the number of rows the second, but for those whose rows hold no addresses.
inline const std::map<std::string, Told>& tables() {
  static const Told no_addresses = [](Touched&, const void*, u32) {};
  static const Told one_read = rows<Piece>([](Touched& to, const Piece& piece) { to.read(piece.left); });
  static const Told left_to_right =
      rows<Piece>([](Touched& to, const Piece& piece) { to.read(piece.left), to.write(piece.right); });
  static const std::map<std::string, Told> all = {
      {"checksum_blocks", one_read},
      {"squares", one_read},
      {"copy_blocks", left_to_right},
      {"round_blocks", left_to_right},
      {"unit_blocks", left_to_right},
      {"polynomial_blocks", left_to_right},
      {"add_present", rows<Piece>([](Touched& to, const Piece& piece) {
         const bool counts = piece.width == 8;
         counts ? to.read(piece.left) : to.write(piece.left);
         to.read(piece.right);
         counts ? to.write(piece.first) : to.read(piece.first);
         to.read(piece.salt);
       })},
      {"stacked_products", rows<Product>([](Touched& to, const Product& product) {
         to.read(product.left), to.read(product.right), to.write(product.out);
       })},
      {"update_chunks", rows<Move>([](Touched& to, const Move& move) {
         to.write(move.weight), to.write(move.second), to.read(move.gradient), to.write(move.rounded);
         move.second != 0 ? to.write(move.first) : to.read(move.first);
       })},
      {"nesterov", rows<Move>([](Touched& to, const Move& move) {
         to.write(move.weight), to.write(move.first), to.read(move.gradient);
       })},
      {"finish", rows<Unfinished>([](Touched& to, const Unfinished& one) {
         to.read(one.from), to.read(one.other), to.read(one.factor), to.write(one.out);
       })},
      {"finish_add", rows<Addition>([](Touched& to, const Addition& one) {
         to.read(one.left), to.read(one.right), to.read(one.left_ends), to.read(one.right_ends), to.write(one.out);
       })},
      {"checksum_pieces", no_addresses},
      {"attention_f32", no_addresses},
      {"attention_queries_f32", no_addresses},
      {"attention_keys_f32", no_addresses},
      {"attention_64_bf16", no_addresses},
      {"attention_128_bf16", no_addresses},
      {"attention_256_bf16", no_addresses},
      {"attention_queries_64_bf16", no_addresses},
      {"attention_queries_128_bf16", no_addresses},
      {"attention_queries_256_bf16", no_addresses},
      {"attention_keys_64_bf16", no_addresses},
      {"attention_keys_128_bf16", no_addresses},
      {"attention_keys_256_bf16", no_addresses},
  };
  return all;
}

// Whether all that a kernel touches can be told.
inline bool is_told(const emulator::Kernel& kernel) {
  for (size_t i = 0; i < kernel.parameters.count; ++i)
    if (kernel.parameters.uses[i] == emulator::Use::table) return tables().count(kernel.name) != 0;
  return true;
}

inline Touched::Touched(const emulator::Kernel& kernel, void** arguments) {
  const auto argument = [=](auto& into, size_t index) { memcpy(&into, arguments[index], sizeof(into)); };
  for (size_t i = 0; i < kernel.parameters.count; ++i) {
    if (kernel.parameters.uses[i] == emulator::Use::value) continue;
    const void* address = nullptr;
    argument(address, i);
    add(address, kernel.parameters.uses[i] == emulator::Use::writes);
  }
  const auto told = tables().find(kernel.name);
  if (told == tables().end()) return;
  const void* table = nullptr;
  u32 count = 0;
  argument(table, 0);
  // Where the second parameter is memory, what is read of it counts nothing.
  if (kernel.parameters.uses[1] == emulator::Use::value) argument(count, 1);
  told->second(*this, table, count);
}
