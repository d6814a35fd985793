#include "transport/memory_limit.h"

#include <gtest/gtest.h>
#include <sys/sysinfo.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "common/errors.h"

namespace bagua {
namespace {

// A folder that stands for the root of a machine's files.
class Machine : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "limitsXXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root = name;
  }
  void TearDown() override { std::filesystem::remove_all(root); }

  void write(const std::string& file, const std::string& text) const {
    const std::filesystem::path path = root + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  void group2(const std::string& path, const std::string& limit, int used,
              const std::string& stat = "") const {
    const std::string group = "/sys/fs/cgroup" + path;
    write(group + "/memory.max", limit);
    write(group + "/memory.current", std::to_string(used));
    write(group + "/memory.stat", stat);
  }
  void expect(const std::string& file, uint64_t nbytes, uint64_t used) const {
    const auto limit = group_limit(root);
    ASSERT_TRUE(limit);
    EXPECT_EQ(limit->file, root + file);
    EXPECT_EQ(limit->nbytes, nbytes);
    EXPECT_EQ(limit->used_nbytes, used);
    EXPECT_EQ(limit->left(), nbytes - used);
  }

  std::string root;
};

TEST_F(Machine, HasNoLimitWithoutGroupsOrWhereNoneIsSet) {
  EXPECT_FALSE(group_limit(root));
  write("/proc/self/cgroup", "0::/a");
  EXPECT_FALSE(group_limit(root));
  group2("/a", "max", 10);
  EXPECT_FALSE(group_limit(root));
}

TEST_F(Machine, OfVersion2CountsNoCachesOfFiles) {
  write("/proc/self/cgroup", "0::/a");
  group2("/a", "1000", 900,
         "anon 300\nfile 500\nslab_reclaimable 7\ninactive_file 100\nactive_file 200");
  expect("/sys/fs/cgroup/a/memory.max", 1000, 593);
}

TEST_F(Machine, OfVersion2TakesTheGroupAboveThatLeavesLess) {
  write("/proc/self/cgroup", "0::/a/b/c");
  group2("/a/b/c", "5000", 100);
  group2("/a/b", "max", 900);
  group2("/a", "1000", 950);
  group2("", "2000", 960);
  expect("/sys/fs/cgroup/a/memory.max", 1000, 950);
}

// A container of version 1 sees the path that its group has outside, but not the folder.
TEST_F(Machine, OfVersion1IsFoundInAContainer) {
  write("/proc/self/cgroup", "11:cpu,cpuacct:/docker/1\n4:hugetlb,memory:/docker/1\n0::/");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4000");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "3000");
  write("/sys/fs/cgroup/memory/memory.kmem.usage_in_bytes", "40");
  write("/sys/fs/cgroup/memory/memory.stat",
        "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 60");
  expect("/sys/fs/cgroup/memory/memory.limit_in_bytes", 4000, 2400);
}

TEST_F(Machine, MaySwapAsMuchAsItsGroup) {
  write("/proc/self/cgroup", "0::/");
  group2("", "1000", 100);
  EXPECT_EQ(group_limit(root)->swap_nbytes, UINT64_MAX);
  write("/sys/fs/cgroup/memory.swap.current", "30");
  for (const auto& [most, left] :
       {std::pair<const char*, uint64_t>{"max", UINT64_MAX}, {"0", 0}, {"100", 70}}) {
    write("/sys/fs/cgroup/memory.swap.max", most);
    EXPECT_EQ(group_limit(root)->swap_nbytes, left) << most;
  }
  write("/proc/self/cgroup", "4:memory:/");  // version 1 counts swap and memory together
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "800");
  write("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "1500");
  write("/sys/fs/cgroup/memory/memory.memsw.usage_in_bytes", "900");
  EXPECT_EQ(group_limit(root)->swap_nbytes, 400u);
}

TEST_F(Machine, ThatUsesMoreThanIsAllowedLeavesNothing) {
  write("/proc/self/cgroup", "0::/");
  group2("", "1000", 1200);
  EXPECT_EQ(group_limit(root)->left(), 0u);
  group2("", "1000", 100, "inactive_file 300");  // not read at one time
  expect("/sys/fs/cgroup/memory.max", 1000, 0);
}

TEST_F(Machine, RefusesWhatItsGroupDoesNotAllow) {
  constexpr uint64_t kAllowed = 70000000, kUsed = 65000000;
  write("/proc/self/cgroup", "0::/a");
  group2("/a", std::to_string(kAllowed), kUsed);
  refuse_beyond_limits(kAllowed - kUsed, root);
  struct sysinfo machine{};
  ASSERT_EQ(::sysinfo(&machine), 0);
  const size_t wish = kAllowed - kUsed + machine.totalswap * machine.mem_unit + 1;
  try {
    refuse_beyond_limits(wish, root);
    FAIL() << "not even with all swap";
  } catch (const UsageError& error) {
    EXPECT_EQ(std::string(error.what()),
              "cannot have " + std::to_string(wish) + " bytes of shared memory: " + root +
                  "/sys/fs/cgroup/a/memory.max allows 70000000, 65000000 of them are in use; "
                  "raise that limit, or run fewer ranks under it");
  }
}

TEST_F(Machine, RefusesMoreThanItHas) {
  try {
    refuse_beyond_limits(size_t{1} << 60, root);
    FAIL() << "an exabyte";
  } catch (const UsageError& error) {
    EXPECT_EQ(std::string(error.what())
                  .find("cannot have 1152921504606846976 bytes of shared "
                        "memory: all memory of this machine is "),
              0u)
        << error.what();
  }
}

}  // namespace
}  // namespace bagua
