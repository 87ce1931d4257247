// The manifest of a checkpoint: what it says, how it is written and how strictly it is read. Used
// by the store (checkpoint.cpp) and the verifier (checkpoint_verify.cpp) only.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/checkpoint.h"

namespace torus {

constexpr const char* manifest_name = "manifest.json";
constexpr int64_t checksum_chunk = int64_t(4) << 20;  // bytes under one checksum

struct ManifestFile {
    std::string name;
    int64_t bytes = 0;
    std::vector<std::string> checksums;  // of each chunk, 16 hex digits
};

struct Manifest {
    CheckpointState state;
    std::vector<ManifestFile> files;
};

// 64 bits over any bytes. A change inside one aligned 8-byte word always changes it; any other
// change goes unseen with probability 2^-64. It guards against accidents, not against forgery.
uint64_t checksum(const void* data, int64_t bytes);

// Size and checksums of `dir`/`name` as it lies on the disk.
ManifestFile describe_file(const std::string& dir, const std::string& name);

// The manifest's text ends with a checksum of itself.
std::string write_manifest(const Manifest&);
Manifest read_manifest(const std::string& dir);  // Error(bad_data): every damage is found

// "step_00001000" -> 1000; -1 for any other name.
int64_t step_of_folder(const std::string& name);

}  // namespace torus
