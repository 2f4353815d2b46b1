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
                                   std::span<const int64_t> strides, bool coming,
                                   const ShardLayouts& layouts)
    : directory_(directory),
      version_(version),
      addresses_(addresses.begin(), addresses.end()),
      strides_(strides.begin(), strides.end()),
      layouts_(directory->num_leaves()),
      leaves_(directory->num_leaves(), coming ? Leaf::kComing : Leaf::kHeld) {
  for (const auto& [leaf, layout] : layouts) layouts_[leaf] = layout;
}

void PublishedVersion::Add(uint32_t leaf, std::span<const uint64_t> addresses,
                           std::span<const int64_t> strides, const ShardLayouts& layouts) {
  // Readers use what is held without a lock, so only what is not may change.
  if (leaves_[leaf] == Leaf::kHeld) return;
  for (const uint32_t shard : directory_->ShardsOf(leaf)) {
    const size_t first = directory_->first_stride(shard);
    addresses_[shard] = addresses[shard];
    std::ranges::copy(strides.subspan(first, directory_->shard(shard).rank),
                      strides_.begin() + first);
  }
  const auto layout = layouts.find(leaf);
  layouts_[leaf] = layout == layouts.end() ? nullptr : layout->second;
  leaves_[leaf] = Leaf::kHeld;
}

Status PublishedVersions::Publish(uint64_t version, std::span<const uint64_t> addresses,
                                  std::span<const int64_t> strides, bool coming,
                                  const ShardLayouts& layouts) {
  TSR_RETURN_IF_ERROR(CheckNumbers(addresses.size(), strides.size()));
  TSR_RETURN_IF_ERROR(CheckLayouts(layouts));
  auto given =
      std::make_shared<PublishedVersion>(directory_, version, addresses, strides, coming, layouts);
  std::lock_guard lock(mutex_);
  const auto [it, is_new] = versions_.emplace(version, std::move(given));
  if (is_new || coming) return Status();
  for (uint32_t leaf = 0; leaf < directory_->num_leaves(); ++leaf) {
    it->second->Add(leaf, addresses, strides, layouts);
  }
  return Status();
}

Status PublishedVersions::AddLeaves(uint64_t version, std::span<const uint32_t> leaves,
                                    std::span<const uint64_t> addresses,
                                    std::span<const int64_t> strides, const ShardLayouts& layouts) {
  TSR_RETURN_IF_ERROR(CheckNumbers(addresses.size(), strides.size()));
  TSR_RETURN_IF_ERROR(CheckLayouts(layouts));
  TSR_RETURN_IF_ERROR(CheckLeaves(leaves));
  std::lock_guard lock(mutex_);
  const auto it = versions_.find(version);
  if (it == versions_.end()) return NotPublished(version);
  for (const uint32_t leaf : leaves) it->second->Add(leaf, addresses, strides, layouts);
  return Status();
}

Status PublishedVersions::CheckLayouts(const ShardLayouts& layouts) const {
  for (const auto& [leaf, layout] : layouts) {
    TSR_RETURN_IF_ERROR(CheckLeaves(std::span(&leaf, 1)));
    for (const uint32_t index : directory_->ShardsOf(leaf)) {
      const ShardDirectory::Shard& shard = directory_->shard(index);
      if (layout->Fits(directory_->range(shard), shard.itemsize)) continue;
      return Status(Code::kInvalid, "publish: leaf " + std::to_string(leaf) +
                                        " has a layout of other shards than its own");
    }
  }
  return Status();
}

Status PublishedVersions::DropLeaves(uint64_t version, std::span<const uint32_t> leaves) {
  TSR_RETURN_IF_ERROR(CheckLeaves(leaves));
  std::lock_guard lock(mutex_);
  const auto it = versions_.find(version);
  if (it == versions_.end()) return NotPublished(version);
  for (const uint32_t leaf : leaves) {
    it->second->leaves_[leaf] = PublishedVersion::Leaf::kDropped;
  }
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
    if (it->second->leaves_[leaf] == PublishedVersion::Leaf::kHeld) leaves.push_back(leaf);
  }
  return leaves;
}

Status PublishedVersions::Find(uint64_t version, std::span<const uint32_t> leaves,
                               std::shared_ptr<const PublishedVersion>* out) const {
  std::lock_guard lock(mutex_);
  const auto it = versions_.find(version);
  if (it == versions_.end()) return NotPublished(version);
  for (const uint32_t leaf : leaves) {
    if (it->second->leaves_[leaf] == PublishedVersion::Leaf::kDropped) {
      return Status(Code::kGone, "leaf " + std::to_string(leaf) + " of version " +
                                     std::to_string(version) + " is not held any more");
    }
  }
  const bool all_held = std::ranges::all_of(leaves, [&](uint32_t leaf) {
    return it->second->leaves_[leaf] == PublishedVersion::Leaf::kHeld;
  });
  *out = all_held ? it->second : nullptr;
  return Status();
}

Status PublishedVersions::CheckNumbers(size_t num_addresses, size_t num_strides) const {
  if (num_addresses == directory_->num_shards() && num_strides == directory_->num_strides()) {
    return Status();
  }
  return Status(Code::kInvalid, "publish: expected " + std::to_string(directory_->num_shards()) +
                                    " addresses and " + std::to_string(directory_->num_strides()) +
                                    " strides, got " + std::to_string(num_addresses) + " and " +
                                    std::to_string(num_strides));
}

Status PublishedVersions::CheckLeaves(std::span<const uint32_t> leaves) const {
  for (const uint32_t leaf : leaves) {
    if (leaf >= directory_->num_leaves()) {
      return Status(Code::kInvalid, "there is no leaf " + std::to_string(leaf));
    }
  }
  return Status();
}

}  // namespace tsr
