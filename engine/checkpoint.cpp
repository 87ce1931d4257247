// The checkpoint store. A save is a transaction on a folder: write step_N.tmp, sync every file,
// read everything back (a write that was acknowledged and lost shows only there), the manifest
// last, sync the folder, rename, sync the parent, and only then remove older checkpoints. Whatever
// dies in between, the previous checkpoint is untouched and the next start clears the rest away.
#include "engine/checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "data/files.h"
#include "engine/checkpoint_format.h"
#include "engine/log.h"
#include "kernels/text.h"
#include "model/checked_file.h"

namespace torus {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_io(const std::string& path, const char* what, int error) {
    fail(Exit::io, path, ": ", what, ": ", std::strerror(error));
}

void warn(const std::string& text) {
    std::fprintf(stderr, "warning: %s\n", printable(text).c_str());
}

void sync_folder(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) fail_io(path, "cannot be opened", errno);
    const int error = ::fsync(fd) != 0 ? errno : 0;
    ::close(fd);
    // Some network file systems cannot sync a folder and say EINVAL; the rename stands there.
    if (error != 0 && error != EINVAL) fail_io(path, "fsync failed", error);
}

void rename_path(const std::string& from, const std::string& to) {
    if (::rename(from.c_str(), to.c_str()) != 0) fail_io(from, "cannot be renamed", errno);
}

bool exists(const std::string& path) {
    struct stat status {};
    return ::lstat(path.c_str(), &status) == 0;
}

bool remove_tree(const std::string& path) {  // a link is removed, not followed
    std::error_code error;
    fs::remove_all(path, error);
    return !error;
}

// Real folders in `dir` named step_N + suffix, as N, newest first.
std::vector<int64_t> steps_in(const std::string& dir, const std::string& suffix) {
    std::vector<int64_t> steps;
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(dir, error)) {
        const std::string name = entry.path().filename().string();
        if (name.size() <= suffix.size() || !name.ends_with(suffix)) continue;
        const int64_t step = step_of_folder(name.substr(0, name.size() - suffix.size()));
        if (step >= 0 && entry.symlink_status().type() == fs::file_type::directory)
            steps.push_back(step);
    }
    require(!error, Exit::io, dir, ": cannot be listed: ", error.message());
    std::sort(steps.rbegin(), steps.rend());
    return steps;
}

// --- the folder's lock

[[noreturn]] void fail_start(const std::string& dir, int error) {
    const bool full = error == ENOSPC || error == EDQUOT || error == EIO;
    fail(full ? Exit::io : Exit::permission, "--save-dir: ", dir,
         ": cannot be written: ", std::strerror(error),
         full ? "; free some space" : "; choose a folder that you can write");
}

void create_folder(const std::string& dir) {
    std::error_code error;
    const bool created = fs::create_directories(dir, error);
    if (error) fail_start(dir, error.value());
    if (!created) return;
    // A name that is not synced can vanish with the power. Folders above may not be readable.
    for (fs::path p = fs::absolute(dir); p.has_relative_path(); p = p.parent_path()) {
        const int fd = ::open(p.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0) break;
        ::fsync(fd);
        ::close(fd);
    }
}

// Proves that folders can be made and removed here.
void probe_folder(const std::string& dir) {
    const std::string probe = dir + "/.probe";
    if (::mkdir(probe.c_str(), 0777) != 0 && errno != EEXIST) fail_start(dir, errno);
    if (::rmdir(probe.c_str()) != 0) fail_start(dir, errno);
}

// The kernel drops the lock with its owner, however it dies; the text only serves the message.
int lock_folder(const std::string& dir) {
    const std::string path = dir + "/.lock";
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) fail_start(dir, errno);
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
        const int error = errno;
        if (error == EWOULDBLOCK) {
            char owner[128] = {};
            const ssize_t n = ::pread(fd, owner, sizeof owner - 1, 0);
            ::close(fd);
            fail(Exit::mismatch, "--save-dir: ", dir, ": in use by another run (",
                 n > 0 ? printable(owner) : "no name",
                 "); wait for it, stop it, or choose another folder");
        }
        warn(concat(path, ": cannot be locked (", std::strerror(error),
                    "); take care that no second run saves in this folder"));
    }
    char host[64] = "?";
    ::gethostname(host, sizeof host - 1);
    const std::string owner = concat("process ", ::getpid(), " on ", host);
    if (::ftruncate(fd, 0) != 0 ||
        ::pwrite(fd, owner.data(), owner.size(), 0) != ssize_t(owner.size())) {
        const int error = errno;
        ::close(fd);
        fail_start(dir, error);
    }
    return fd;
}

// What a run that died in save() left behind.
void clear_leftovers(const std::string& dir) {
    for (const int64_t step : steps_in(dir, ".old")) {
        const std::string path = dir + "/" + CheckpointStore::folder_of(step);
        if (exists(path))
            remove_tree(path + ".old");
        else
            rename_path(path + ".old", path);
    }
    for (const int64_t step : steps_in(dir, ".tmp"))
        remove_tree(dir + "/" + CheckpointStore::folder_of(step) + ".tmp");
}

// --- writing

int64_t bytes_of(const SavedTensor& t) { return t.shape.numel() * size_of(t.dtype); }

int64_t bytes_needed(const CheckpointFiles& files) {
    int64_t bytes = 1 << 20;  // configuration, manifest, folders
    for (const auto* list : {&files.model, &files.optimizer})
        for (const SavedTensor& t : *list) bytes += bytes_of(t) + int64_t(t.name.size()) + 128;
    if (data::is_file(files.tokenizer_path)) bytes += int64_t(fs::file_size(files.tokenizer_path));
    return bytes;
}

int64_t bytes_free(const std::string& dir) {
    struct statvfs status {};
    if (::statvfs(dir.c_str(), &status) != 0) fail_io(dir, "cannot ask for its free space", errno);
    return int64_t(status.f_bavail) * int64_t(status.f_frsize);
}

// Reads what was just written; what the reader refuses, the disk has lost.
template <class F>
auto read_back(const std::string& path, const F& read) {
    try {
        return read();
    } catch (const Error& e) {
        fail(Exit::io, path, ": does not read back as written (", e.what(), ")");
    }
}

// Writes the tensors and compares what the disk gives back with what was meant.
void write_tensors(const std::string& path, const std::vector<SavedTensor>& tensors) {
    SafetensorsWriter writer(path, {{"format", "pt"}});  // "pt" is what other readers ask for
    int64_t largest = 0;
    for (const SavedTensor& t : tensors) {
        writer.add(t.name, t.dtype, t.shape);
        largest = std::max(largest, bytes_of(t));
    }
    std::vector<char> bytes(size_t(largest), char(0));
    std::vector<uint64_t> sums;
    for (const SavedTensor& t : tensors) {
        t.fill(bytes.data());
        sums.push_back(checksum(bytes.data(), bytes_of(t)));
        writer.write(bytes.data(), bytes_of(t));
    }
    writer.finish();

    const auto written = read_back(path, [&] { return open_safetensors(path); });
    for (size_t i = 0; i < tensors.size(); ++i) {
        const SavedTensor& t = tensors[i];
        const Tensor back = written->find(t.name);
        require(back.dtype == t.dtype && back.shape == t.shape &&
                    checksum(back.data, bytes_of(t)) == sums[i],
                Exit::io, path, ": tensor ", t.name, " does not read back as written");
    }
}

void write_text(const std::string& path, const std::string& text) {
    CheckedFile file(path);
    file.write(text.data(), int64_t(text.size()));
    file.finish();
    const std::string back = data::read_file(path, int64_t(text.size()));
    require(back == text, Exit::io, path, ": does not read back as written");
}

void write_folder(const std::string& dir, const CheckpointState& state,
                  const CheckpointFiles& files) {
    if (::mkdir(dir.c_str(), 0777) != 0) fail_io(dir, "cannot be created", errno);
    Manifest manifest{state, {}};
    const auto add = [&](const char* name) { manifest.files.push_back(describe_file(dir, name)); };
    const std::string config = dir + "/config.json";
    write_hf_config(config, files.config);
    read_back(config, [&] { return read_hf_config(config); });
    add("config.json");
    write_tensors(dir + "/model.safetensors", files.model);
    add("model.safetensors");
    write_tensors(dir + "/optimizer.safetensors", files.optimizer);
    add("optimizer.safetensors");
    if (data::is_file(files.tokenizer_path)) {
        write_text(dir + "/tokenizer.json", data::read_file(files.tokenizer_path, 1 << 30));
        add("tokenizer.json");
    } else if (!files.tokenizer_path.empty()) {  // weights without it are better than none
        warn(concat(files.tokenizer_path, ": is missing; the checkpoint has no tokenizer"));
    }
    write_text(dir + "/" + manifest_name, write_manifest(manifest));
    sync_folder(dir);
}

// Moves step_N.tmp to its name. An older checkpoint of the same step waits as step_N.old.
void publish(const std::string& dir, const std::string& name) {
    const std::string path = dir + "/" + name, fresh = path + ".tmp", old = path + ".old";
    const bool replaces = exists(path);
    if (replaces) rename_path(path, old);
    try {
        rename_path(fresh, path);
        sync_folder(dir);
    } catch (const Error&) {
        ::rename(path.c_str(), fresh.c_str());
        if (replaces) ::rename(old.c_str(), path.c_str());
        throw;
    }
    if (replaces) remove_tree(old);
}

// --- other checkpoints in the folder

std::string run_id_of(const std::string& path) {  // empty: no intact manifest
    try {
        return read_manifest(path).state.run_id;
    } catch (const Error&) {
        return "";
    }
}

bool is_intact(const std::string& path) {
    try {
        verify_checkpoint(path);
        return true;
    } catch (const Error& e) {
        warn(concat("broken checkpoint: ", e.what()));
        return false;
    }
}

// Checkpoints of another run, of later steps than this one (the run went back to an older one) or
// without an intact manifest would be taken for this run's at the next resume: they are renamed.
void set_strangers_aside(const std::string& dir, const CheckpointState& state) {
    for (const int64_t step : steps_in(dir, "")) {
        const std::string path = dir + "/" + CheckpointStore::folder_of(step);
        if (step <= state.step && run_id_of(path) == state.run_id) continue;
        std::string aside = path + ".aside";
        for (int n = 2; exists(aside); ++n) aside = concat(path, ".aside", n);
        rename_path(path, aside);
        warn(concat(path, ": is not of this run's past; kept as ", aside));
    }
}

}  // namespace

CheckpointStore::CheckpointStore(std::string dir) : dir_(std::move(dir)) {
    std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is a failed write, not the end of training
    create_folder(dir_);
    lock_ = lock_folder(dir_);
    try {
        probe_folder(dir_);
        clear_leftovers(dir_);
    } catch (...) {
        ::close(lock_);
        throw;
    }
}

CheckpointStore::~CheckpointStore() { ::close(lock_); }

std::string CheckpointStore::folder_of(int64_t step) {
    const std::string digits = std::to_string(step);
    return "step_" + std::string(digits.size() < 8 ? 8 - digits.size() : 0, '0') + digits;
}

void CheckpointStore::save(const CheckpointState& state, const CheckpointFiles& files,
                           int64_t keep) {
    CHECK(state.step >= 0 && keep >= 1 && !state.run_id.empty());
    const std::string name = folder_of(state.step), fresh = dir_ + "/" + name + ".tmp";
    const int64_t needed = bytes_needed(files), available = bytes_free(dir_);
    const auto space = [&] {
        return concat("; the checkpoint needs ", human_bytes(needed), ", ",
                      human_bytes(bytes_free(dir_)), " are free in ", dir_);
    };
    require(needed <= available, Exit::io, "--save-dir: the disk is too full", space(),
            "; free some space or choose another folder");
    remove_tree(fresh);
    try {
        write_folder(fresh, state, files);
        set_strangers_aside(dir_, state);
        publish(dir_, name);
    } catch (const Error& e) {
        remove_tree(fresh);
        if (e.code == Exit::io) fail(Exit::io, e.what(), space());
        throw;
    } catch (...) {
        remove_tree(fresh);
        throw;
    }
    verified_.insert(state.step);  // write_folder read it back
    prune(keep);
}

void CheckpointStore::prune(int64_t keep) {
    int64_t kept = 0;
    for (const int64_t step : steps_in(dir_, "")) {
        const std::string path = dir_ + "/" + folder_of(step);
        if (kept < keep) {
            if (!verified_.contains(step) && is_intact(path)) verified_.insert(step);
            kept += int64_t(verified_.contains(step));
            continue;
        }
        // First it ceases to be a checkpoint, then its files go.
        const bool gone =
            ::rename(path.c_str(), (path + ".tmp").c_str()) == 0 && remove_tree(path + ".tmp");
        if (!gone) warn(concat(path, ": old checkpoint cannot be removed"));
    }
}

std::string CheckpointStore::newest() const {
    const std::vector<int64_t> steps = steps_in(dir_, "");
    for (const int64_t step : steps) {
        const std::string path = dir_ + "/" + folder_of(step);
        if (!is_intact(path)) continue;
        verified_.insert(step);
        return path;
    }
    require(steps.empty(), Exit::bad_data, dir_, ": none of its ", steps.size(),
            " checkpoints is intact; restore one, or start anew in another --save-dir");
    return "";
}

}  // namespace torus
