#include "published.h"

#include <algorithm>

namespace tsr {
namespace {

Status NotPublished(uint64_t version) {
  return Status(Code::kGone, "version " + std::to_string(version) + " is not published here");
}

}  // namespace

PublishedVersion::PublishedVersion(const ShardDirectory* directory, uint64_t version,
                                   std::span<const uint64_t> addresses,
                                   std::span<const int64_t> strides)
    : directory_(directory),
      version_(version),
      addresses_(addresses.begin(), addresses.end()),
      strides_(strides.begin(), strides.end()),
      held_(directory->num_leaves(), true) {}

Status PublishedVersions::Publish(uint64_t version, std::span<const uint64_t> addresses,
                                  std::span<const int64_t> strides) {
  if (addresses.size() != directory_->num_shards() || strides.size() != directory_->num_strides()) {
    return Status(Code::kInvalid, "publish: expected " + std::to_string(directory_->num_shards()) +
                                      " addresses and " +
                                      std::to_string(directory_->num_strides()) + " strides, got " +
                                      std::to_string(addresses.size()) + " and " +
                                      std::to_string(strides.size()));
  }
  auto given = std::make_shared<PublishedVersion>(directory_, version, addresses, strides);
  std::lock_guard lock(mutex_);
  const auto [it, is_new] = versions_.emplace(version, given);
  if (is_new) return Status();
  PublishedVersion& published = *it->second;
  // Readers use what is held without a lock, so only what is not may change.
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (published.held_[directory_->shard(i).leaf]) continue;
    published.addresses_[i] = addresses[i];
    std::ranges::copy(given->strides(i), published.strides_.begin() + directory_->first_stride(i));
  }
  published.held_.assign(published.held_.size(), true);
  return Status();
}

Status PublishedVersions::DropLeaves(uint64_t version, std::span<const uint32_t> leaves) {
  for (const uint32_t leaf : leaves) {
    if (leaf >= directory_->num_leaves()) {
      return Status(Code::kInvalid, "drop: there is no leaf " + std::to_string(leaf));
    }
  }
  std::lock_guard lock(mutex_);
  const auto it = versions_.find(version);
  if (it == versions_.end()) return NotPublished(version);
  for (const uint32_t leaf : leaves) it->second->held_[leaf] = false;
  return Status();
}

void PublishedVersions::Withdraw(uint64_t version) {
  std::lock_guard lock(mutex_);
  versions_.erase(version);
}

bool PublishedVersions::Holds(uint64_t version) const {
  std::lock_guard lock(mutex_);
  return versions_.contains(version);
}

std::vector<uint32_t> PublishedVersions::HeldLeaves(uint64_t version) const {
  std::vector<uint32_t> leaves;
  std::lock_guard lock(mutex_);
  const auto it = versions_.find(version);
  if (it == versions_.end()) return leaves;
  leaves.reserve(directory_->num_leaves());
  for (uint32_t leaf = 0; leaf < directory_->num_leaves(); ++leaf) {
    if (it->second->held_[leaf]) leaves.push_back(leaf);
  }
  return leaves;
}

Status PublishedVersions::Find(uint64_t version, std::span<const uint32_t> leaves,
                               std::shared_ptr<const PublishedVersion>* out) const {
  std::lock_guard lock(mutex_);
  const auto it = versions_.find(version);
  if (it == versions_.end()) return NotPublished(version);
  for (const uint32_t leaf : leaves) {
    if (!it->second->held_[leaf]) {
      return Status(Code::kGone, "leaf " + std::to_string(leaf) + " of version " +
                                     std::to_string(version) + " is not held any more");
    }
  }
  *out = it->second;
  return Status();
}

}  // namespace tsr
