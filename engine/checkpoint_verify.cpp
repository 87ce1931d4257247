// Reading a checkpoint back with suspicion. Folders come from a disk that lies and from strangers:
// names in the manifest must be plain, links are not followed, every size is compared before bytes
// are read, and every byte is under a checksum whose failure names file and range.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>

#include "data/files.h"
#include "engine/checkpoint_format.h"
#include "kernels/text.h"
#include "model/strict_json.h"

namespace torus {
namespace {

constexpr int64_t manifest_limit = int64_t(256) << 20;
constexpr int64_t format_version = 1;
constexpr const char* damaged = "; the checkpoint is damaged, use another one";

// --- checksum: four lanes of multiply and rotate, each step a bijection of the lane and the word
constexpr uint64_t prime1 = 0x9e3779b185ebca87u, prime2 = 0xc2b2ae3d27d4eb4fu;

uint64_t mix(uint64_t lane, uint64_t word) { return std::rotl(lane + word * prime2, 31) * prime1; }

// An open regular file inside a folder, never through a link.
class InsideFile {
public:
    InsideFile(const std::string& dir, const std::string& name) : path_(dir + "/" + name) {
        fd_ = ::open(path_.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
        if (fd_ < 0 && errno == ENOENT) fail(Exit::bad_data, path_, ": is missing", damaged);
        if (fd_ < 0 && errno == ELOOP) fail(Exit::bad_data, path_, ": is a link", damaged);
        if (fd_ < 0) fail(Exit::io, path_, ": cannot be opened: ", std::strerror(errno), damaged);
        struct stat status {};
        if (::fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) {
            ::close(fd_);
            fail(Exit::bad_data, path_, ": is not a regular file", damaged);
        }
        bytes_ = int64_t(status.st_size);
    }
    ~InsideFile() { ::close(fd_); }
    InsideFile(const InsideFile&) = delete;
    InsideFile& operator=(const InsideFile&) = delete;

    int64_t bytes() const { return bytes_; }
    const std::string& path() const { return path_; }
    void read(int64_t offset, char* to, int64_t n) const {
        while (n > 0) {
            const ssize_t got = ::pread(fd_, to, size_t(n), off_t(offset));
            if (got < 0 && errno == EINTR) continue;
            if (got < 0)
                fail(Exit::io, path_, ":byte ", offset, ": cannot be read: ", std::strerror(errno),
                     damaged);
            require(got > 0, Exit::bad_data, path_, ":byte ", offset, ": ends here, expected ", n,
                    " bytes more", damaged);
            to += got;
            offset += got;
            n -= got;
        }
    }

private:
    std::string path_;
    int fd_ = -1;
    int64_t bytes_ = 0;
};

// The last lines of a manifest whose text before them is `body`.
std::string manifest_tail(std::string_view body) {
    return concat("  \"checksum\": \"", data::hex(checksum(body.data(), int64_t(body.size()))),
                  "\"\n}\n");
}

bool plain_name(const std::string& name) {
    const auto plain = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '_' || c == '-' || c == '.';
    };
    return !name.empty() && name.size() <= 255 && name[0] != '.' &&
           std::all_of(name.begin(), name.end(), plain);
}

// One field of the manifest, with its type checked.
template <class T>
T field(const nlohmann::json& object, const char* key, const std::string& path) {
    const auto at = object.is_object() ? object.find(key) : object.end();
    require(object.is_object() && at != object.end(), Exit::bad_data, path, ":", key,
            ": is missing", damaged);
    if constexpr (std::is_same_v<T, int64_t>) {
        const bool fits = at->is_number_unsigned() && at->template get<uint64_t>() < (1ull << 62);
        require(fits, Exit::bad_data, path, ":", key, ": must be a whole number from 0", damaged);
    } else if constexpr (std::is_same_v<T, std::string>) {
        require(at->is_string(), Exit::bad_data, path, ":", key, ": must be a string", damaged);
    } else {
        require(at->is_array(), Exit::bad_data, path, ":", key, ": must be a list", damaged);
    }
    return at->template get<T>();
}

ManifestFile parse_file(const nlohmann::json& j, const std::string& path) {
    ManifestFile f;
    f.name = field<std::string>(j, "name", path);
    f.bytes = field<int64_t>(j, "bytes", path);
    require(plain_name(f.name), Exit::bad_data, path, ":files: the name ", excerpt(f.name),
            " is not a plain file name", damaged);
    for (const nlohmann::json& sum : field<nlohmann::json>(j, "checksums", path)) {
        require(sum.is_string(), Exit::bad_data, path, ":checksums: must be strings", damaged);
        f.checksums.push_back(sum.get<std::string>());
    }
    const int64_t chunks = (f.bytes + checksum_chunk - 1) / checksum_chunk;
    require(int64_t(f.checksums.size()) == chunks, Exit::bad_data, path,
            ":files: ", f.checksums.size(), " checksums for ", f.name, ", expected ", chunks,
            damaged);
    return f;
}

void check_files(const std::vector<ManifestFile>& files, const std::string& path) {
    for (const ManifestFile& f : files) {
        const auto same = [&](const ManifestFile& g) { return g.name == f.name; };
        require(std::count_if(files.begin(), files.end(), same) == 1, Exit::bad_data, path,
                ":files: ", f.name, " is listed twice", damaged);
    }
    for (const char* name : {"config.json", "model.safetensors", "optimizer.safetensors"}) {
        const auto same = [&](const ManifestFile& g) { return g.name == name; };
        require(std::any_of(files.begin(), files.end(), same), Exit::bad_data, path,
                ":files: ", name, " is not listed", damaged);
    }
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
    const nlohmann::json j = parse_strict(text, path);
    require(field<std::string>(j, "format", path) == "torus-checkpoint", Exit::bad_data, path,
            ":format: is ", excerpt(field<std::string>(j, "format", path)),
            ", expected \"torus-checkpoint\"; give a folder that this program saved");
    const int64_t version = field<int64_t>(j, "version", path);
    require(version == format_version, Exit::bad_data, path, ":version: is ", version,
            ", this program reads ", format_version, "; use the program that wrote it");
    Manifest m;
    m.state.step = field<int64_t>(j, "step", path);
    m.state.next_sequence = field<int64_t>(j, "next_sequence", path);
    m.state.run_id = field<std::string>(j, "run_id", path);
    m.state.data_fingerprint = field<std::string>(j, "data_fingerprint", path);
    m.state.model_json = field<std::string>(j, "model", path);
    m.state.precision = field<std::string>(j, "precision", path);
    m.state.config_toml = field<std::string>(j, "config_toml", path);
    const int64_t chunk = field<int64_t>(j, "checksum_chunk", path);
    require(chunk == checksum_chunk, Exit::bad_data, path, ":checksum_chunk: is ", chunk,
            ", expected ", checksum_chunk, damaged);
    for (const nlohmann::json& file : field<nlohmann::json>(j, "files", path))
        m.files.push_back(parse_file(file, path));
    check_files(m.files, path);
    return m;
}

void verify_file(const std::string& dir, const ManifestFile& expected) {
    const InsideFile file(dir, expected.name);
    require(file.bytes() == expected.bytes, Exit::bad_data, file.path(), ": has ", file.bytes(),
            " bytes, the manifest says ", expected.bytes, damaged);
    const ManifestFile found = describe_file(dir, expected.name);
    for (size_t i = 0; i < expected.checksums.size(); ++i) {
        if (i < found.checksums.size() && found.checksums[i] == expected.checksums[i]) continue;
        const int64_t begin = int64_t(i) * checksum_chunk;
        fail(Exit::bad_data, file.path(), ":bytes ", begin, "-",
             std::min(begin + checksum_chunk, expected.bytes) - 1, ": checksum ",
             i < found.checksums.size() ? found.checksums[i] : "none", ", the manifest says ",
             excerpt(expected.checksums[i]), damaged);
    }
}

}  // namespace

uint64_t checksum(const void* data, int64_t bytes) {
    const char* p = static_cast<const char*>(data);
    uint64_t lane[4] = {prime1, prime2, ~prime1, ~prime2};
    uint64_t words[4];
    int64_t left = bytes;
    for (; left >= 32; left -= 32, p += 32) {
        std::memcpy(words, p, 32);
        for (int i = 0; i < 4; ++i) lane[i] = mix(lane[i], words[i]);
    }
    if (left > 0) {  // zeros fill the last words: the length below tells them from real zeros
        std::memset(words, 0, 32);
        std::memcpy(words, p, size_t(left));
        for (int i = 0; i < 4; ++i) lane[i] = mix(lane[i], words[i]);
    }
    uint64_t sum = uint64_t(bytes);
    for (uint64_t l : lane) sum = mix(sum, l);
    sum = (sum ^ sum >> 29) * prime2;
    return sum ^ sum >> 32;
}

ManifestFile describe_file(const std::string& dir, const std::string& name) {
    const InsideFile file(dir, name);
    ManifestFile f{name, file.bytes(), {}};
    std::vector<char> chunk(size_t(std::min(checksum_chunk, f.bytes)));
    for (int64_t begin = 0; begin < f.bytes; begin += checksum_chunk) {
        const int64_t n = std::min(checksum_chunk, f.bytes - begin);
        file.read(begin, chunk.data(), n);
        f.checksums.push_back(data::hex(checksum(chunk.data(), n)));
    }
    return f;
}

std::string write_manifest(const Manifest& m) {
    nlohmann::ordered_json j = {{"format", "torus-checkpoint"},
                                {"version", format_version},
                                {"step", m.state.step},
                                {"next_sequence", m.state.next_sequence},
                                {"run_id", m.state.run_id},
                                {"data_fingerprint", m.state.data_fingerprint},
                                {"model", m.state.model_json},
                                {"precision", m.state.precision},
                                {"config_toml", m.state.config_toml},
                                {"checksum_chunk", checksum_chunk},
                                {"files", nlohmann::ordered_json::array()}};
    for (const ManifestFile& f : m.files)
        j["files"].push_back({{"name", f.name}, {"bytes", f.bytes}, {"checksums", f.checksums}});
    std::string text = j.dump(2);
    text.resize(text.size() - 2);  // "\n}" comes after the checksum
    text += ",\n";
    return text + manifest_tail(text);
}

Manifest read_manifest(const std::string& dir) {
    const InsideFile file(dir, manifest_name);
    require(file.bytes() <= manifest_limit, Exit::bad_data, file.path(), ": has ", file.bytes(),
            " bytes, at most ", manifest_limit, " are allowed", damaged);
    std::string text(size_t(file.bytes()), '\0');
    file.read(0, text.data(), file.bytes());
    const size_t tail_bytes = manifest_tail("").size();
    const size_t body = text.size() < tail_bytes ? 0 : text.size() - tail_bytes;
    const std::string expected = manifest_tail(std::string_view(text).substr(0, body));
    require(text.compare(body, std::string::npos, expected) == 0, Exit::bad_data, file.path(),
            ":bytes 0-", std::max<int64_t>(file.bytes(), 1) - 1,
            ": the checksum in its last line does not fit its text", damaged);
    return parse_manifest(text, file.path());
}

int64_t step_of_folder(const std::string& name) {
    if (name.rfind("step_", 0) != 0) return -1;
    int64_t step = -1;
    const char* const end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data() + 5, end, step);
    const bool good = error == std::errc() && stop == end && step >= 0 &&
                      CheckpointStore::folder_of(step) == name;
    return good ? step : -1;
}

CheckpointState verify_checkpoint(const std::string& dir) {
    require(data::is_folder(dir), Exit::missing_input, dir,
            ": is not a folder; give a checkpoint's folder");
    const Manifest m = read_manifest(dir);
    const std::string folder = std::filesystem::path(dir).filename().string();
    const int64_t step = step_of_folder(folder);
    require(step < 0 || step == m.state.step, Exit::bad_data, dir, "/", manifest_name, ":step: is ",
            m.state.step, ", the folder's name says ", step, "; give the folder the name ",
            CheckpointStore::folder_of(m.state.step));
    for (const ManifestFile& f : m.files) verify_file(dir, f);
    return m.state;
}

}  // namespace torus
