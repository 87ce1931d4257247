// Documents of text files: see documents.h.
#include "data/documents.h"

#include <algorithm>
#include <array>

#include "data/files.h"
#include "data/json.h"
#include "data/tokenizer_json.h"
#include "kernels/check.h"
#include "kernels/text.h"

namespace torus::data {
namespace {

constexpr int64_t longest_jsonl_line = 64 << 20;
constexpr int64_t read_size = 1 << 20;

// Lines with their line break, of any length up to `limit` bytes.
class LineReader {
public:
    LineReader(const std::string& path, int64_t limit)
        : path_(path), limit_(limit), file_(File::open_to_read(path)), size_(file_.size(path)) {
        buffer_.resize(size_t(std::min(read_size, size_)));
    }

    bool next(std::string& line) {
        line.clear();
        while (true) {
            if (at_ == filled_ && !refill()) break;
            const char* const begin = buffer_.data() + at_;
            const char* const end = buffer_.data() + filled_;
            const char* const stop = std::find(begin, end, '\n');
            line.append(begin, stop);
            require(int64_t(line.size()) <= limit_, Exit::bad_data, path_, ":line ", number_ + 1,
                    ": longer than ", limit_, " bytes; split the document");
            at_ = stop - buffer_.data();
            if (stop == end) continue;
            ++at_;
            line.push_back('\n');
            break;
        }
        if (number_ == 0 && line.rfind("\xef\xbb\xbf", 0) == 0) line.erase(0, 3);
        ++number_;
        return !line.empty();
    }
    int64_t number() const { return number_; }  // of the line read last, from 1

private:
    bool refill() {
        const int64_t n = std::min(int64_t(buffer_.size()), size_ - offset_);
        if (n == 0) return false;
        file_.read_at(path_, offset_, buffer_.data(), n);
        offset_ += n;
        at_ = 0;
        filled_ = n;
        return true;
    }

    const std::string& path_;
    int64_t limit_;
    File file_;
    int64_t size_, offset_ = 0, at_ = 0, filled_ = 0, number_ = 0;
    std::string buffer_;
};

bool has_extension(const std::string& path, std::string_view extension) {
    return path.size() > extension.size() &&
           path.compare(path.size() - extension.size(), extension.size(), extension) == 0;
}

std::string document_of_json(std::string_view line, const std::string& where) {
    const nlohmann::json object = parse_json(line, where);
    require(object.is_object(), Exit::bad_data, where,
            ": not a JSON object; write one object with the key \"text\" on each line");
    const auto text = object.find("text");
    if (text == object.end()) {
        const std::string found = object.empty() ? "no key" : excerpt(object.begin().key());
        fail(Exit::bad_data, where, ": key \"text\" is missing (found ", found,
             "); put the document there");
    }
    require(text->is_string(), Exit::bad_data, where, ": key \"text\" is ", text->type_name(),
            ", it must be a string; put the document there");
    return text->get<std::string>();
}

void for_each_json_document(const std::string& path,
                            const std::function<void(std::string_view)>& visit) {
    LineReader lines(path, longest_jsonl_line);
    std::string line;
    while (lines.next(line)) {
        if (line.find_first_not_of(" \t\r\n") == std::string::npos) continue;
        const std::string text = document_of_json(line, concat(path, ":line ", lines.number()));
        if (!text.empty()) visit(text);
    }
}

}  // namespace

bool is_text_file(const std::string& path) {
    return has_extension(path, ".txt") || has_extension(path, ".jsonl");
}

void for_each_document(const std::string& path,
                       const std::function<void(std::string_view)>& visit) {
    if (has_extension(path, ".jsonl")) return for_each_json_document(path, visit);
    LineReader lines(path, int64_t(1) << 40);
    std::string line, document;
    const auto finish = [&] {
        if (!document.empty()) visit(document);
        document.clear();
    };
    while (lines.next(line)) {
        std::string_view content = line;
        while (!content.empty() && (content.back() == '\n' || content.back() == '\r')) {
            content.remove_suffix(1);
        }
        if (content == end_of_text_name) {
            finish();
        } else {
            document += line;
        }
    }
    finish();
}

void tokenize_files(const std::vector<std::string>& paths, const Tokenizer& tokenizer,
                    const std::function<void(const std::vector<int32_t>&)>& write) {
    std::vector<int32_t> ids;
    for (const std::string& path : paths) {
        require(is_text_file(path), Exit::usage, path,
                ": unknown kind of file, allowed are .txt and .jsonl; rename or convert it");
        for_each_document(path, [&](std::string_view document) {
            ids.clear();
            if (tokenizer.end_of_text() >= 0) ids.push_back(tokenizer.end_of_text());
            tokenizer.encode(document, ids);
            write(ids);
        });
    }
}

}  // namespace torus::data
