// The device that a launcher plans for.
#pragma once

namespace custom_ops::flash_attention {

struct Device {
  int multiprocessors;
  int capability;  // 90 for sm_90
};

}  // namespace custom_ops::flash_attention
